"""One run or one evaluation outside a study, as `cohort train` and `cohort evaluate` do them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import cast

import torch
from filelock import FileLock, Timeout

from harness import plugins
from harness._checks import check_inputs
from harness._files import read_json
from harness._progress import WatchedLog, phase_bar, study_view
from harness._stop import StopRequest
from harness._terminal import say
from harness.cold_start import start_policy
from harness.evaluate import evaluate
from harness.interfaces import RolloutEngine
from harness.memory import check_memory
from harness.model import mixed_precision, resolve_device
from harness.spec import RunSpec, SpecError
from harness.tracking import RunLog, read_result
from harness.train import RunResult, evaluation_metrics, train
from harness.types import EvaluationResult, Split


def train_once(spec: RunSpec, runs: Path, name: str) -> RunResult:
    """Train in `runs/train/name`, or continue there, or return the result of a run that has ended there.

    ValueError, before any model loads, for what cannot run and for a folder with another run.
    """
    check_inputs([spec], runs)
    if spec.steps:
        check_memory(spec)
    directory = runs / "train" / name
    with own_folder(directory, spec):
        ended = read_result(directory)
        if ended is not None and ended["state"] in ("complete", "invalid"):
            return RunResult(ended["state"], ended["reason"], ended["summary"])
        with stop_after_step() as should_stop:
            return run_logged(train, spec, runs, directory, name, should_stop)


def evaluate_once(spec: RunSpec, split: Split, runs: Path, name: str) -> EvaluationResult:
    """The accuracy of the policy that the spec starts from, after the cold start if it has one.

    Metrics and every graded completion go to `runs/evaluate/name` and to MLflow's experiment `evaluate`.
    """
    check_inputs([spec], runs, (split,))
    directory = runs / "evaluate" / name
    with (
        own_folder(directory, spec),
        RunLog.open(runs, directory, spec, experiment="evaluate", run_name=name, parent_run_id=None, tags={}) as log,
    ):
        log.resume(-1)
        result = _evaluate(spec, split, runs)
        log.metrics(0, evaluation_metrics(result))
        log.samples(result.samples)
        log.finish("complete", None, {f"{split}_accuracy": result.metrics["accuracy"]})
    return result


def _evaluate(spec: RunSpec, split: Split, runs: Path) -> EvaluationResult:
    with phase_bar(f"{spec.model} on {spec.task.name}") as show:
        policy, tokenizer = start_policy(spec, runs / "cache", lambda done, total: show("cold start", done, total))
        device = resolve_device(spec.device)
        policy = policy.to(device=device, dtype=getattr(torch, spec.dtype))
        engine_class = cast(type[RolloutEngine], plugins.load("engine", spec.engine.name))
        engine = engine_class(spec.engine, policy, tokenizer)
        with closing(engine), mixed_precision(device, spec.autocast):
            return evaluate(
                spec.task,
                engine,
                split,
                spec.evaluation,
                max_tokens=spec.sampling_with_limit().max_tokens or 0,
                stop=spec.sampling.stop,
                seed=spec.seed,
                step=0,
                on_progress=lambda done, total: show(split, done, total),
                num_shown=sys.maxsize,
            )


def model_folder(model: str) -> str:
    """The folder that transformers loads, where `model` is a checkpoint or a run with checkpoints; else `model`."""
    for folder in (Path(model), *sorted((Path(model) / "checkpoints").glob("step-*"), reverse=True)):
        if (folder / "policy" / "config.json").is_file():
            return str(folder / "policy")
    return model


def run_logged(
    execute: Callable[..., RunResult],
    spec: RunSpec,
    runs: Path,
    directory: Path,
    name: str,
    should_stop: Callable[[], bool],
    *,
    parent_run_id: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> RunResult:
    """What `execute`, called like `harness.train.train`, makes of the run, logged and shown while it lasts."""
    with RunLog.open(
        runs, directory, spec, experiment="train", run_name=name, parent_run_id=parent_run_id, tags=tags or {}
    ) as log:
        with study_view() as view:
            watched = WatchedLog(log, name, spec.seed, directory, view.update)
            result = execute(spec, directory, watched, cache=runs / "cache", should_stop=should_stop)
        log.finish(result.state, result.reason, result.summary)
    return result


@contextmanager
def own_folder(directory: Path, spec: RunSpec) -> Iterator[None]:
    """Hold the folder; SpecError where it has a run with other settings, or another process holds it."""
    file = directory / "run.json"
    if file.exists() and read_json(file)["spec"] != spec.model_dump(mode="json"):
        raise SpecError(f"'{directory}' holds a run with other settings; choose another --name or delete the folder")
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(directory / "lock", timeout=0):
            yield
    except Timeout:
        raise SpecError(f"another process trains in '{directory}'; choose another --name or wait for it") from None


@contextmanager
def stop_after_step() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: the first press lets the step end and a checkpoint be written, the second raises."""
    pressed = StopRequest()

    def handle(*_: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()
        say("Stopping after this step; Ctrl-C again stops at once.", stderr=True)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
