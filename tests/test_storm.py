"""A study whose workers are killed at random moments ends with the values of an undisturbed one, whatever it does
meanwhile: take turns, share a model, clone an arm, decide its seeds, train on two devices."""

import contextlib
import os
import random
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kill_points
import psutil
import pytest
from cohort.harness.base.files import read_json
from cohort.harness.mirror.writer import COST_AREAS
from cohort.harness.record.events import read_events
from cohort.harness.record.run import CHECKPOINTS, read_progress
from cohort.harness.record.status import StudyStatus
from cohort.harness.record.study import read_study
from cohort.harness.run import loop
from cohort.harness.settings.study import StudySpec
from cohort.harness.study import runner, steering, worker
from cohort.harness.study.launchers import local
from factories import FEW, make_study
from queues import completions, open_queue, run
from zygote import Zygote

pytestmark = pytest.mark.long

RUN = {
    **FEW, "algorithm": {"name": "grpo", "group_size": 4}, "cold_start": {"steps": 30}, "sampling": {"max_tokens": 12},
    "evaluation": {**FEW["evaluation"], "every": 3}, "checkpoints": {"every": 1, "rollouts_every": 2}, "steps": 8,
    "rewards": {"accuracy": 1.0, "format": 1.0},
}  # fmt: skip
LORA = {**RUN, "lora": {"rank": 4, "alpha": 8.0}}
STAGES = {"first": 3, "half_width": 0.02, "at_most": 4}
TWO, FOUR = {"algorithm.kl_beta": [0.0, 0.1]}, {"algorithm.kl_beta": [0.0, 0.1, 0.2, 0.3]}
MIXED: dict[str, tuple[StudySpec, dict[str, Any]]] = {
    "clones": (make_study(name="storm", run=RUN, factors=FOUR, seeds=[0]), {}),
    "two stages": (make_study(name="storm", run=RUN, factors=TWO, seeds=STAGES), {}),
    "together, two stages": (make_study(name="storm", run=LORA, factors=TWO, seeds=STAGES), {"together": True}),
    "together, clones": (make_study(name="storm", run=LORA, factors=FOUR, seeds=[0]), {"together": True}),
    "two devices": (
        make_study(name="storm", run={**RUN, "devices": 2, "device": "cpu"}, factors=TWO, seeds=[0, 1]),
        {"workers": 1},
    ),
}  # fmt: skip
COSTS = ("peak", "core")  # of a summary, beside the areas of metrics that are costs
START_WORKER = local.start_worker
SPARED = 6  # kills of a trial at one step after which it may take the next: ten end it
PARENT, LEAVES = "kl_beta=0", 3


def train(spec: Any, directory: Path, log: Any, *, cache: Path, should_stop: Callable[[], bool], **more: Any) -> Any:
    """As the real loop, but the arm that is to be cloned is stopped after the step at which the clone leaves it."""
    runs = cache.parent

    def asked() -> bool:
        if log.step == LEAVES and not (runs / "cloned").exists() and directory.name.startswith(f"{PARENT}-seed"):
            steering.steer("stop", "storm", runs, PARENT)
        return should_stop()

    return loop.train(spec, directory, log, cache=cache, should_stop=asked, **more)


def clone(runs: Path, status: StudyStatus) -> None:
    """Clone the stopped arm, warm, once all its trials are at the step at which the clone leaves; until then let it go
    on, because a kill may have come between the request and the checkpoint."""
    trials = [trial for trial in status.trials if trial.arm == PARENT]
    if (runs / "cloned").exists() or any(trial.state == "running" for trial in trials) or not trials[0].held:
        return
    if all((trial.directory / CHECKPOINTS / f"step-{LEAVES:08d}").exists() for trial in trials):
        steering.clone_arm("storm", runs, PARENT, {"optimizer.learning_rate": 0.01}, warm=True)
        (runs / "cloned").touch()
    steering.steer("resume", "storm", runs, PARENT)


def values(runs: Path) -> dict[str, Any]:
    """Trial -> everything that its record has, without clocks and memory. What a later attempt logs again in the same
    words counts once: a kill between the test and the end leaves the test's events behind."""
    found: dict[str, Any] = {}
    for file in sorted(runs.glob("studies/storm/trials/*/events.jsonl")):
        logged: list[Any] = []
        for event in read_events(file):
            if event["type"] == "metrics":
                numbers = event["values"].items()
                event["values"] = {k: v for k, v in numbers if not k.startswith(COST_AREAS)}
            if event["type"] != "start":
                ends = event.get("summary", {}).items()
                event["summary"] = {k: v for k, v in ends if k.partition("_")[0] not in COST_AREAS + COSTS}
                said = {k: v for k, v in event.items() if k not in ("time", "sum")}
                if said not in logged:
                    logged.append(said)
        found[file.parent.name] = logged
    return found


class Fire:
    """Kills a process of a worker that has a trial, at random moments."""

    def __init__(self, runs: Path, draw: random.Random, most: int, longest: float) -> None:
        self.runs, self.draw, self.most, self.longest = runs, draw, most, longest
        self.kills: Counter[str] = Counter()  # phase of the trial -> kills
        self._stuck: Counter[tuple[str, int]] = Counter()  # trial, its step -> kills

    @contextlib.contextmanager
    def burning(self) -> Iterator[None]:
        self._over = threading.Event()
        thread = threading.Thread(target=self._kill, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _kill(self) -> None:
        while not self._over.wait(self.draw.uniform(0.1, self.longest)) and self.kills.total() < self.most:
            for lease in self.draw.sample(found := sorted(self.runs.glob("studies/storm/trials/*/lease")), len(found)):
                with contextlib.suppress(OSError, ValueError, KeyError, psutil.NoSuchProcess):
                    holder = psutil.Process(read_json(lease)["pid"])
                    if holder.status() == psutil.STATUS_ZOMBIE:
                        continue
                    shown = read_progress(lease.parent)
                    at = (lease.parent.name, shown.get("step", 0))
                    if self._stuck[at] >= SPARED:
                        continue
                    os.kill(holder.pid, signal.SIGKILL)
                    self._stuck[at] += 1
                    self.kills[shown.get("phase", "start")] += 1
                    break


@pytest.fixture
def zygote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Zygote]:
    """Of the workers of all studies here."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{Path(__file__).parent}")
    monkeypatch.setattr(runner, "mirrored", lambda *_: contextlib.nullcontext())
    with contextlib.closing(Zygote()) as one:
        monkeypatch.setattr(local, "start_worker", one.start_worker)
        yield one


def ended(kind: str, runs: Path, execute: str | None = None) -> dict[str, Any]:
    """The values of a study of this kind that was run to its end."""
    runs.mkdir(exist_ok=True)
    study, options = MIXED[kind]
    act = (lambda status: clone(runs, status)) if "clones" in kind else None
    own = "test_storm:train" if "clones" in kind else worker.EXECUTE
    left = True
    while left:  # a fast machine ends the other arms before the clone is there: the same command goes on with it
        status = run(study, runs, act, execute=execute or own, **options)
        assert status.finished and status.all_valid, [trial.reason for trial in status.trials]
        left = any(trial.is_open or trial.held for trial in open_queue(study, runs).status().trials)
    assert set(completions(open_queue(study, runs)).values()) == {1}
    record = read_study(runs, "storm")
    assert not record.strange and len(record.exploratory) == ("clones" in kind)
    return values(runs)


def check_same_values(found: dict[str, Any], want: dict[str, Any]) -> None:
    assert found.keys() == want.keys()
    assert [name for name in want if found[name] != want[name]] == []


@pytest.mark.attack("SIGKILL at random moments in studies with turns, shared models, clones, two stages")
@pytest.mark.parametrize("kind", list(MIXED))
@pytest.mark.timeout(7200)
def test_a_study_in_a_storm_of_kills_ends_with_the_values_of_an_undisturbed_one(
    tmp_path: Path,
    kind: str,
    zygote: Zygote,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
):
    forks = "devices" not in kind
    if not forks:  # torch's agent starts their processes
        monkeypatch.setattr(local, "start_worker", START_WORKER)
    wanted = int(os.environ.get("COHORT_STORM", "125" if forks else "12"))
    want, kills, number = ended(kind, tmp_path / "quiet"), Counter[str](), 0
    while kills.total() < wanted:
        number += 1
        runs = tmp_path / f"storm {number}"
        if number > 1:  # the first one makes its cold start under fire
            shutil.copytree(tmp_path / "quiet" / "cache", runs / "cache")
        draw = random.Random(f"{kind} {number}")
        fire = Fire(runs, draw, wanted - kills.total(), 1.5 if forks else 15.0)
        with fire.burning():
            found = ended(kind, runs)
        kills += fire.kills
        print(f"{kind}, round {number}: {dict(kills)}", flush=True)
        check_same_values(found, want)
    record_property("tried", kills.total())


@pytest.mark.attack("SIGKILL before and after every place that flushes, renames, deletes or locks")
@pytest.mark.parametrize("kind", ["clones", "together, clones"])
@pytest.mark.timeout(3600)
def test_workers_that_die_at_each_place_that_writes_change_neither_shared_models_nor_warm_clones(
    tmp_path: Path, kind: str, zygote: Zygote, record_property: Callable[[str, object], None]
):
    want, kills = ended(kind, tmp_path / "quiet"), tmp_path / "kills"
    kills.mkdir()
    zygote.environment[kill_points.KILLS] = str(kills)
    found = ended(kind, tmp_path / "runs", "kill_points:steered")
    places = [file.name for file in kills.iterdir() if not file.name.startswith("ended ")]
    print(f"{kind}: {len(places)} places", flush=True)
    assert len(places) >= 16
    check_same_values(found, want)
    record_property("tried", len(places))
