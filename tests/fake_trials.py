"""Stand-ins that workers can import: a task, an algorithm and an engine that load no torch, and a run that is fast.

`install` makes them plugins named `fake`, as an installed package would. `optimizer.weight_decay` of a spec says how
its run ends: 0 complete; 0.1 invalid at step 2; 0.2 a crash at step 2 while the file `crash` lies in the runs folder;
0.3 complete without the study's metric. A step takes FAKE_STEP_SECONDS (environment), and
ends not before the file `hold` is gone from the runs folder or the run is asked to stop.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

from cohort.harness.base.files import read_json, sync, write_json
from cohort.harness.data import Demonstration, Prompt, SampleRow, Split, TrialState
from cohort.harness.interfaces import Algorithm, RolloutEngine, Task
from cohort.harness.mirror.follow import RecordMirror
from cohort.harness.mirror.store import connect
from cohort.harness.mirror.writer import MirrorState
from cohort.harness.record.run import RunLog
from cohort.harness.record.study import keep_document, study_document
from cohort.harness.settings.run import RunSpec, parse_run
from cohort.harness.settings.study import StudySpec
from entry_points import declare
from factories import make_study

EXECUTE = "fake_trials:train"
CHECKPOINT_EVERY = 3


def install(folder: Path, monkeypatch: Any) -> None:
    """Make the plugins known to this process and to its children."""
    points = {"tasks": "FakeTask", "algorithms": "FakeAlgorithm", "engines": "FakeEngine"}
    places = {group: {"fake": f"fake_trials:{cls}"} for group, cls in points.items()}
    declare(folder, monkeypatch, "fake-plugins", places)


def empty_store(factory: Any) -> Path:
    """An MLflow store without runs to copy from, made once for all test processes: making one takes seconds."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "empty store"
    connect(folder)
    return folder / "mlflow.db"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def train_on_gpu(*args: Any, **kwargs: Any) -> FakeResult:
    """`train` in a process that then holds something on a GPU."""
    cuda = SimpleNamespace(is_initialized=lambda: True, is_available=lambda: False)
    vars(sys.modules.setdefault("torch", ModuleType("torch"))).update(cuda=cuda)
    return train(*args, **kwargs)


class FakeTask(Task):
    name: Literal["fake"] = "fake"
    empty_split: str = ""

    @property
    def max_completion_tokens(self) -> int:
        return 8

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [] if split == self.empty_split else [Prompt("p1" if split == "test" else split, "1+1=", "2")]

    def demonstrations(self) -> Sequence[Demonstration]:
        return []

    def extract(self, completion: str) -> str | None:
        return None

    def equivalent(self, answer: str, other: str) -> bool:
        return answer == other


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("a fake run has no batches and no engine")


class FakeAlgorithm(Algorithm):
    objective = {"advantage": "none"}  # noqa: RUF012
    name: Literal["fake"] = "fake"
    kl_beta: float = 0.0
    advantages = loss = never


class FakeEngine(RolloutEngine):
    class Settings(RolloutEngine.Settings):
        name: Literal["fake"] = "fake"  # pyright: ignore[reportIncompatibleVariableOverride]

    __init__ = generate = load_weights = never


@dataclass(frozen=True)
class FakeResult:
    state: TrialState
    reason: str | None = None
    summary: dict[str, float] = field(default_factory=dict)


def run_settings(**changes: Any) -> dict[str, Any]:
    """The run section of a study of fakes."""
    return {"task": "fake", "algorithm": "fake", "engine": "fake", "rollouts_per_step": 64, "steps": 7, **changes}


def a_spec(**changes: Any) -> RunSpec:
    """A run of such a study."""
    return parse_run(run_settings(**changes), "test")


def a_study(**changes: object) -> StudySpec:
    """Two arms, two seeds, seven steps of the stub."""
    factors = {"algorithm.group_size": [2, 4]}
    defaults = {"name": "sizes", "question": "Do larger groups help?", "run": run_settings(), "factors": factors}
    return make_study(**{**defaults, **changes})


def begin_study(runs: Path, study: StudySpec, command: str = "cohort study run sizes") -> Path:
    """The folder of a study that has begun, with its document."""
    folder = runs / "studies" / study.name
    known = read_json(folder / "study.json") if (folder / "study.json").exists() else None
    keep_document(folder, study_document(study, command, known=known))
    return folder


def of_study(runs: Path, name: str, trial: str, **tags: str) -> dict[str, str]:
    """Tags of a trial of a study that has begun; `tags` without their prefix."""
    file = runs / "studies" / name / "study.json"
    design = read_json(file)["digest"] if file.exists() else ""
    known = {"study": name, "design": design, "trial": trial, "kind": "trial", "seed": "0", "factors": "{}"}
    known |= {"phase": "final", **tags}
    return {f"cohort.{key}": value for key, value in known.items()}


def in_mlflow(runs: Path, folder: Path) -> str:
    """The id of the MLflow run of the record in a folder, after all that it has was copied."""
    root = next(one for one in (folder, *folder.parents) if one.parent.parent == runs)
    RecordMirror(runs, root).copy()
    return str(MirrorState.load(folder).run_id)


def open_study(runs: Path, study: StudySpec, command: str = "cohort study run sizes") -> str:
    """The id of the parent run of a study that has begun."""
    return in_mlflow(runs, begin_study(runs, study, command))


def accuracy(spec: RunSpec, step: int) -> float:
    """What the fake run logs as validation/accuracy: a function of spec, seed and step."""
    return (spec.algorithm.group_size + spec.seed / 10 + step / 100) / 100


def sample(step: int, text: str = "2#### 2") -> SampleRow:
    return SampleRow(step, "validation", "p1", "1+1=", text, "2", "2", True, None, 7, "stop")


def train(spec: RunSpec, directory: Path, log: RunLog, *, cache: Path, should_stop: Callable[[], bool]) -> FakeResult:
    """Run or continue the fake, as cohort.harness.run.loop.train does."""
    runs, ending = cache.parent, spec.optimizer.weight_decay
    with (runs / "executions.log").open("a") as file:
        file.write(f"{directory.name} {os.getpid()}\n")
    checkpoint = directory / "checkpoint.json"
    saved = read_json(checkpoint) if checkpoint.exists() else {"step": -1, "num_events": 0}
    step = saved["step"] if log.holds(saved["step"], saved["num_events"]) else -1
    log.resume(step)
    metric = "validation/other" if ending == 0.3 else "validation/accuracy"
    if step < 0:
        step = 0
        log.metrics(step, {metric: accuracy(spec, step)})
    while step < spec.steps:
        time.sleep(float(os.environ.get("FAKE_STEP_SECONDS", "0")))
        step += 1
        log.metrics(step, {metric: accuracy(spec, step), "seconds/step": time.perf_counter()})
        log.samples([sample(step)])
        log.progress("train", step, spec.steps)
        if ending == 0.1 and step == 2:
            return FakeResult("invalid", "policy/loss is NaN at step 2")
        if ending == 0.2 and step == 2 and (runs / "crash").exists():
            raise RuntimeError("no memory left at step 2")
        stop = should_stop()
        while not stop and (runs / "hold").exists():  # so that a test can act in the middle of a run
            time.sleep(0.05)
            log.progress("train", step, spec.steps)  # which writes only now and then
            stop = should_stop()
        if step % CHECKPOINT_EVERY == 0 or stop:
            write_json(checkpoint, {"step": step, "num_events": log.sync()})
            sync(directory)
        if stop and step < spec.steps:
            return FakeResult("stopped")
    log.per_problem({"p1": 1.0})
    return FakeResult("complete", None, {"accuracy_final": accuracy(spec, step), "seconds": 1.5})
