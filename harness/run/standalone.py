"""Runs one training run or one evaluation outside a study, for `cohort train` and `cohort evaluate`."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from filelock import FileLock, Timeout

from ..base.files import read_json
from ..base.inputs import Inputs, expecting
from ..base.stop import stop_on_signals
from ..base.words import duration
from ..checks.disk import check_disk
from ..checks.memory import check_memory
from ..checks.preflight import check_length, check_runs, run_inputs
from ..data import FINAL, EvaluationResult, Split
from ..devices import group
from ..mirror.follow import mirrored
from ..record.run import RunLog, drop_checkpoints, final_result
from ..record.status import StudyStatus, TrialStatus
from ..settings.errors import SpecError
from ..settings.run import RunSpec
from .build import RunResult, build_engine, engine_settings, first_prompt, placed
from .cold_start import start_policy
from .evaluate import ROWS, EndedRows, evaluate_run, evaluation_metrics, weights_read
from .loop import train

OnProgress = Callable[..., None]  # phase, done, total, and perhaps words on its course
MOST_SHOWN = 10_000  # completions of an evaluation in its events, from which MLflow has its traces


def train_once(
    spec: RunSpec, runs: Path, name: str, on_status: Callable[[StudyStatus], None] = lambda status: None
) -> RunResult:
    """The result of training in `runs/train/name`, begun, continued or ended there before; `on_status` is shown it as a
    study of one trial. ValueError, before any model loads, if it cannot run or the folder has another run;
    InputsChanged if an earlier attempt there read something else."""
    directory = runs / "train" / name

    def show(progress: Mapping[str, Any]) -> None:
        trial = TrialStatus(
            arm=name, seed=spec.seed, state="running", reason=None, phase=progress["phase"] or "loading",
            done=progress["done"], total=progress["total"], accuracy=progress.get("accuracy"),
            tokens_per_second=progress.get("tokens_per_second"), seconds=progress.get("seconds"), directory=directory,
            step=progress["step"], steps=spec.steps,
        )  # fmt: skip
        on_status(StudyStatus(name=name, question="", trials=(trial,)))

    with expecting(recorded_inputs(directory)):
        check_runs([spec], runs)
        if final_result(directory) is None:
            check_disk(runs, [(spec, directory)], 1, "weights")
        with own_folder(directory, spec), stop_on_signals() as should_stop, mirrored(runs, directory):
            if (ended := final_result(directory)) is not None:
                run_inputs([spec], runs / "cache")  # checked for an ended run too, because they may have changed
                result = RunResult(ended["state"], ended["reason"], ended["summary"])
            else:
                opened = RunLog(runs, directory, spec, experiment="train", run_name=name, on_progress=show)

                def finished(result: Any) -> RunResult:
                    opened.finish(result.state, result.reason, result.summary)
                    return result

                with expecting(recorded_inputs(directory)), opened as log:
                    how = {"cache": runs / "cache", "should_stop": should_stop}
                    how["when_stuck"] = lambda tell: finished(tell())
                    result = finished(group.lead(train, spec, directory, log, **how))
            if result.state in FINAL:  # also checkpoints that a killed attempt had no time to delete
                drop_checkpoints(directory, spec.checkpoints.finished or "weights")
    return result


def evaluate_once(
    spec: RunSpec, split: Split, runs: Path, name: str, on_progress: OnProgress = lambda *progress: None
) -> dict[str, EvaluationResult]:
    """The accuracy of the policy that the spec starts from, after the cold start if it has one: by split, and for the
    test split by `test_NAME` of each other test too.

    Every completion goes to `<split>.jsonl`, `test_NAME.jsonl` in `runs/evaluate/name`, from where the next call
    continues; metrics and the first completions go to MLflow's experiment `evaluate` too.
    """
    check_runs([spec], runs, (split,), trained=())
    directory = runs / "evaluate" / name
    if held := next((one for one in get_args(Split) if one != split and any(directory.glob(f"{one}.*"))), None):
        raise SpecError(f"`name` must be the evaluation of one split, and '{name}' is of {held}; choose another")
    with expecting(recorded_inputs(directory) if any(directory.glob(f"{split}.*")) else {}):
        inputs = run_inputs([spec], runs / "cache", (split,))
    measures = {split: spec, **({f"test_{name}": on for name, on in spec.tests.items()} if split == "test" else {})}
    count = spec.evaluation.num_test_prompts if split == "test" else spec.evaluation.num_prompts
    prompts = [prompt for on in measures.values() for prompt in on.task.prompts(split)[:count]]
    check_length(spec, prompts)
    check_memory(spec, learns=False)
    with measured(spec, split, runs, directory, inputs, "evaluate") as log:
        policy, codec = start_policy(spec, runs / "cache", on_progress)
        found: dict[str, EvaluationResult] = {}
        own = getattr(engine_settings(spec, codec, prompts), "dtype", None)
        # An engine with weights of its own reads them on the host, in its own precision, and fills the GPU alone.
        policy = placed(policy, spec) if own is None else policy.to(dtype=getattr(torch, own))
        with closing(build_engine(spec, policy, codec, prompts)) as engine:
            weights = weights_read(spec, engine, policy)
            del policy  # the engine has it, or weights of its own
            for area, on in measures.items():
                pace = Pace(partial(on_progress, area), spec.evaluation.samples_of(split), spec.max_tokens)
                engine.note_tokens, kept = pace.sampled, directory / f"{area}.jsonl"
                engine.ended = EndedRows(kept.with_suffix(ROWS)) if weights else None
                look = partial(on_progress, f"first look at {area}", 0, 0)
                found[area] = evaluate_run(on, engine, split, 0, pace.part_ended, MOST_SHOWN, kept, weights, look)
                log.metrics(0, evaluation_metrics(found[area], area))
        log.samples(found[split].samples)
        log.finish("complete", None, {f"{split}_accuracy": found[split].metrics["accuracy"]})
    return found


class Pace:
    """Shows the course of an evaluation with k samples of each problem, each second and after each part: at first the
    number of completions, then tokens per second and the time left. Before a part has ended, only the `limit` of tokens
    says how long completions are."""

    def __init__(self, show: Callable[[int, int, str], None], k: int, limit: int) -> None:
        self.show, self.k, self.limit = show, k, limit
        self.tokens, self.length, self.first = 0, float(limit), -1

    def part_ended(self, done: int, total: int) -> None:
        """Show how many problems are done; those of the first call are from an earlier attempt."""
        if self.first < 0:
            self.first, self.total, self.begin = done, total, time.monotonic()
            told = f"{total - done:,} problems x (1 greedy + {self.k} sampled) = {(total - done) * (1 + self.k):,}"
            self.show(done, total, f"{told} completions of at most {self.limit:,} tokens")
        else:
            self.length = self.tokens / ((done - self.first) * (1 + self.k))
            self._tell(done)
        self.done, self.told = done, time.monotonic()

    def sampled(self, count: int) -> None:
        """Note more tokens."""
        now = time.monotonic()
        self.begin = self.begin if self.tokens else now
        self.tokens += count
        if now - max(self.told, self.begin) >= 1:
            self.told = now
            self._tell(self.done)

    def _tell(self, done: int) -> None:
        rate = self.tokens / (time.monotonic() - self.begin or 1)
        left = max((self.total - self.first) * (1 + self.k) * self.length - self.tokens, 0)  # later ones may be longer
        most = "at most " if done == self.first else ""
        words = f"{rate:,.0f} tokens/s, {most}{duration(left / rate)} left" if rate else ""  # not all engines tell
        self.show(done, self.total, words)


@contextmanager
def measured(
    spec: RunSpec, split: Split, runs: Path, directory: Path, inputs: Inputs, experiment: str
) -> Iterator[RunLog]:
    """The log of a run that measures the policy of `spec` and trains nothing; it begins anew in `directory`."""
    with (
        expecting(inputs),
        own_folder(directory, spec),
        mirrored(runs, directory),
        RunLog(runs, directory, spec, experiment=experiment, run_name=directory.name) as log,
    ):
        log.about(inputs=dict(inputs), prompt=first_prompt(spec, split))
        log.resume(-1)
        yield log


def recorded_inputs(directory: Path) -> Inputs:
    """The recorded inputs of the run in a folder."""
    file = directory / "run.json"
    return read_json(file).get("inputs", {}) if file.exists() else {}


@contextmanager
def own_folder(directory: Path, spec: RunSpec) -> Iterator[None]:
    """Hold the folder; SpecError if it has a run with other settings, or if another process holds it."""
    file = directory / "run.json"
    if file.exists() and {**read_json(file)["spec"], "devices": spec.devices} != spec.model_dump(mode="json"):
        raise SpecError(f"'{directory}' holds a run with other settings; choose another `name`, or move it away")
    try:
        with FileLock(directory / "lock", timeout=0):  # makes the folder
            yield
    except Timeout:
        raise SpecError(f"another process trains in '{directory}'; choose another `name` or wait for it") from None
