"""A run that is killed inside its steps, and at each write of one, ends with the numbers and weights of an undisturbed
one, bit for bit.

A step of `tiny` takes milliseconds, so no clock finds its middle: the process of the run stops at a named place and
says so, and waits there to be killed. It is at a place once; the next process starts from the checkpoint and comes to
the place after it.
"""

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from cohort.harness.base.files import sha256
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.policy.model import load_tokenizer, save_model
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.record.run import CHECKPOINTS, RunLog
from cohort.harness.run import build, checkpoint, loop, step
from cohort.harness.run.learner import Learner
from cohort.harness.run.loop import train
from cohort.harness.settings.run import parse_run
from factories import FEW
from test_power_cut import logged, work

RUN: dict[str, Any] = {
    **FEW, "steps": 3, "optimizer": {"learning_rate": 1e-3}, "rewards": {"accuracy": 1.0, "token_entropy": 1.0},
    "evaluation": {"every": 2, "num_prompts": 4, "num_test_prompts": 4, "num_samples": 1},
    "checkpoints": {"every": 1, "rollouts_every": 1},
}  # fmt: skip
LORA = {**RUN, "lora": {"rank": 2}}
KINDS: dict[str, dict[str, Any]] = {
    "a sampler with a history": {**RUN, "sampler": {"name": "success_band", "lowest": 0.1}, "dynamic_sampling": 2},
    "older rollouts": {**RUN, "staleness": 2},
    "stages": {**RUN, "stages": [
        {"name": "reason", "steps": 1, "algorithm": {"name": "grpo", "group_size": 4, "kl_beta": 0.1}},
        {"name": "value", "steps": 2, "algorithm": {"name": "ppo"}, "kl": {"schedule": "adaptive", "target": 1e-4}},
    ]},
    "adapters": LORA,  # in a process that has trained another one
    "distillation": {**RUN, "algorithm": {"name": "distill", "group_size": 4}, "rewards": {"accuracy": 0.0}},
}  # fmt: skip
IN_A_STEP = {
    step: ("sample", "annotated", "earned", "rewarded", "correct_mismatch", "note_pass_rates"),
    Learner: ("begin_step", "update", "_optimizer_step"),
    torch.optim.AdamW: ("step",),
    TransformersEngine: ("load_weights",),
}
WRITES = {
    RunLog: ("metrics", "samples", "kept", "sync"),
    build.Run: ("keep",),
    checkpoint: ("save_model", "write_hashed", "write_manifest"),
    os: ("fsync", "rename", "replace", "unlink"),
}
FRESH = multiprocessing.get_context("forkserver")  # a copy of this process, which has trained, would hang
FRESH.set_forkserver_preload([__name__, "transformers.models.llama.modeling_llama", "peft"])


class Places:
    """The places of one run: `reached` is called before each of them, which is after the one before it. A name
    counts once in a step."""

    def __init__(self, reached: Callable[[str], None]) -> None:
        self.reached, self.step, self.here = reached, 0, Counter[str]()
        first = 1 if os.environ.get("COHORT_CHAOS") else RUN["steps"]  # in which places count
        for kind, owners in (("step", IN_A_STEP), ("write", WRITES)):
            for owner, name in [(owner, name) for owner, names in owners.items() for name in names]:
                setattr(owner, name, self._watched(name, getattr(owner, name), kind))
        train_step, save = loop.train_step, build.Run.save

        def stepped(run: Any, prompts: Any, number: int) -> Any:
            self.step, self.here = number + 1 if number + 1 >= first else 0, Counter()
            return train_step(run, prompts, number)

        def saved(run: Any, *given: Any, **more: Any) -> None:
            """A checkpoint is there before the run goes on, so that its next process starts from it."""
            save(run, *given, **more)
            run.writer.check(wait=True)
            self.step = 0

        loop.train_step, build.Run.save = stepped, saved

    def _watched(self, name: str, operation: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def run(*given: Any, **more: Any) -> Any:
            number = self.here[name] = self.here[name] + 1
            words = f"{kind}: {name} {number} of step {self.step}"
            if self.step and number == 1:
                self.reached(words)
            return operation(*given, **more)

        return run


def killed_run(runs: Path, settings: Mapping[str, Any], cache: Path, known: set[str], told: Connection) -> None:
    """Begin or continue the run, and at the first place that is not `known` tell it with the step from which the run
    went on, and wait."""
    start, lock, resume = [0], threading.Lock(), RunLog.resume

    def resumed(log: RunLog, step: int, *given: Any) -> None:
        start[0] = step
        resume(log, step, *given)

    def reached(place: str) -> None:
        if place not in known:
            with lock:
                told.send((place, start[0]))
                told.recv()  # never, but for an error where the test is gone

    spec = parse_run(settings, "test")
    if spec.lora is not None:
        work(Path(f"{runs}-other-{len(known)}"), parse_run({**settings, "seed": 7, "steps": 1}, "test"), train, cache)
    RunLog.resume = resumed
    Places(reached)
    work(runs, spec, train, cache)


def half_written(runs: Path, settings: Mapping[str, Any], cache: Path, name: str, told: Connection) -> None:
    """Begin the run, stop the thread that writes its second checkpoint at `name`, and tell in the update after it."""
    saves, written, half = [0], [0], threading.Event()
    save, save_checkpoint, learn, write = (
        build.Run.save,
        build.save_checkpoint,
        Learner.update,
        getattr(checkpoint, name),
    )

    def saved(*given: Any, **more: Any) -> None:
        save(*given, **more)
        saves[0] += 1

    def counted(*given: Any) -> None:
        written[0] += 1
        save_checkpoint(*given)

    def stopped(*given: Any, **more: Any) -> Any:
        if written[0] == 2:
            half.set()
            threading.Event().wait()
        return write(*given, **more)

    def update(*given: Any) -> Any:
        if saves[0] == 2 and half.wait():
            told.send(name)
            told.recv()
        return learn(*given)

    build.Run.save, build.save_checkpoint, Learner.update = saved, counted, update
    setattr(checkpoint, name, stopped)
    work(runs, parse_run(settings, "test"), train, cache)


def next_kill(*run: Any, target: Callable[..., None] = killed_run) -> Any:
    """Kill a process of a run at the place where it waits: what it told, or None where it came to its end."""
    here, there = FRESH.Pipe()
    with here:
        process = FRESH.Process(target=target, args=(*run, there))
        process.start()  # which loads this module once for all of them
        there.close()
        try:
            killed = here.recv()
            process.kill()
        except EOFError:
            killed = None
        process.join()
        assert process.exitcode == (0 if killed is None else -signal.SIGKILL)
        return killed


def weights(runs: Path) -> dict[str, str]:
    """The hashes of the last checkpoint's weights."""
    last = max((runs / "trials/one" / CHECKPOINTS).glob("step-*"))
    return {file.name: sha256(file) for file in last.rglob("policy/*.safetensors")}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.attack("SIGKILL in a step of a run, or at a write of one")
@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=() if one == "distillation" else pytest.mark.long) for one in KINDS]
)
def test_a_run_that_is_killed_in_its_steps_ends_as_an_undisturbed_one(kind, tmp_path, monkeypatch, record_property):
    monkeypatch.setenv("COHORT_TRACES", "0")
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{Path(__file__).parent}")
    settings = KINDS[kind]
    if kind == "distillation":
        save_model(tmp_path / "teacher", tiny_model(3), load_tokenizer("tiny"))
        settings = {**settings, "kl": {"reference": str(tmp_path / "teacher")}}
    cache, known, last = tmp_path / "cache", set[str](), 1
    (tmp_path / "quiet").mkdir()
    (tmp_path / "killed").mkdir()
    work(tmp_path / "quiet", parse_run(settings, "test"), train, cache)
    while (killed := next_kill(tmp_path / "killed", settings, cache, known)) is not None:
        place, start = killed
        number = int(place.rpartition(" ")[2])
        assert start == last - 1 or (start, last) == (-1, 1) or start == last == number - 1, (place, start)
        known.add(place)
        last = number
    kinds = Counter(place.split(":")[0] for place in known)
    steps = RUN["steps"] if os.environ.get("COHORT_CHAOS") else 1
    assert kinds["step"] >= 9 * steps and kinds["write"] >= 7 * steps
    assert logged(tmp_path / "killed") == logged(tmp_path / "quiet")
    assert weights(tmp_path / "killed") == weights(tmp_path / "quiet") != {}
    record_property("tried", len(known))


@pytest.mark.slow
@pytest.mark.attack("SIGKILL in a step of a run, or at a write of one")
def test_a_run_that_is_killed_while_the_checkpoint_of_the_step_before_is_half_written_ends_the_same(
    tmp_path, monkeypatch, record_property
):
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{Path(__file__).parent}")
    cache, spec, names = tmp_path / "cache", parse_run(RUN, "test"), ("write_hashed", "save_model", "write_manifest")
    for place in ("quiet", *names):
        (tmp_path / place).mkdir()
        if place in names:
            assert next_kill(tmp_path / place, RUN, cache, place, target=half_written) == place
            found = sorted(folder.name for folder in (tmp_path / place / "trials/one" / CHECKPOINTS).iterdir())
            assert "step-00000001" in found and "step-00000002" not in found and len(found) == 2  # one is partial
        work(tmp_path / place, spec, train, cache)
        assert logged(tmp_path / place) == logged(tmp_path / "quiet")
        assert weights(tmp_path / place) == weights(tmp_path / "quiet") != {}
    record_property("tried", len(names))
