"""Single runs: train one, evaluate a model, estimate memory and disk."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.machine import compute_as_a_worker, in_group
from ..checks.preflight import check_devices
from ..console.progress import phase_bar, study_view
from ..console.terminal import duration, say
from ..console.views import source_of
from ..record.run import model_folder
from ..settings.errors import SpecError
from ..settings.load import load_run, runs_of
from ..settings.raw import parse_overrides, read_yaml
from ..settings.run import RunSpec
from .settings import Settings, as_texts, checked_split, runs_folder, scale_settings, suited_rate

if TYPE_CHECKING:
    from ..record.status import StudyStatus
    from ..run.build import RunResult
    from .result import Evaluation


@dataclass(frozen=True)
class Trained:
    """How a run ended."""

    name: str
    directory: Path
    result: RunResult


def train(
    spec: str | Path | None = None,
    settings: Settings = (),
    *,
    name: str | None = None,
    runs: str | Path | None = None,
    command: Sequence[str] | None = None,
) -> Trained:
    """How a run ended that `cohort train` trains or resumes; shows progress, and Ctrl-C stops it after its step.

    A run with several devices needs a group of processes: `command`, the words after `cohort` that ask for this run,
    starts one.
    """
    folder, texts = runs_folder(runs), as_texts(settings)
    run = load_run(None if spec is None else str(spec), texts)
    file = None if spec is None else read_yaml(Path(spec))
    has_critic = any(stage.spec.algorithm.needs_critic for stage in run.staged())
    texts += scale_settings(run.model, texts, trains=run.steps > 0, has_critic=has_critic, file=file)
    texts += suited_rate(run.model, texts, file=file) if run.steps else []
    run = load_run(None if spec is None else str(spec), texts)
    name = checked_name(name or f"{run.task.name}-{run.algorithm.name}-seed{run.seed}-{run.digest()[:8]}")
    _in_its_group(run, command)
    compute_as_a_worker()
    from ..run.standalone import train_once  # after the checks, because it takes seconds

    with study_view() as view:
        return Trained(name, folder / "train" / name, train_once(run, folder, name, _with_time_left(view, run, folder)))


def _with_time_left(view: Callable[[StudyStatus], None], spec: RunSpec, runs: Path) -> Callable[[StudyStatus], None]:
    """A function that shows a run's status with the time left; at first it says what time and memory the run takes."""
    from ..checks.memory import gib, judge
    from ..settings.study import Arm
    from ..study.estimates import TrialTimes

    left: dict[int, float] = {}  # from a step

    def show(status: StudyStatus) -> None:
        (trial,) = status.trials
        if trial.step not in left:
            arm = Arm(trial.arm, {}, {}, spec)
            times = TrialTimes(runs, {trial.arm: arm}, status, workers=1)
            left[trial.step] = seconds = times.left(arm, trial.step)
            if len(left) == 1:
                source, peak = source_of(sum(times.used.values()), "run"), judge(spec)["peak_bytes"]
                words = [f"about {duration(seconds)}, {source}"] * math.isfinite(seconds)
                words += [f"about {gib(peak)} of memory"] * (peak is not None)
                say(f"{trial.arm}: {'; '.join(words) or 'its time and memory are unknown'}", stderr=True)
        here = left[trial.step]
        view(replace(status, trials=(replace(trial, left=here),), left=here))

    return show


def _in_its_group(spec: RunSpec, command: Sequence[str] | None) -> None:
    """Return in the process that leads the run; all others end here, and so does this one if it starts a group."""
    devices = spec.devices
    if in_group():
        from ..devices.group import enter
        from ..run.loop import train as run

        if (group := enter()) is not None and group.rank:
            group.follow(run)
            raise SystemExit(0)
    elif devices > 1:
        from ..devices.group import launch

        check_devices([spec])
        if command is None:
            raise SpecError(f"devices={devices} needs a group of processes: use `cohort train`, or start with torchrun")
        raise SystemExit(launch(["-P", "-m", "cohort", *command], devices))


def evaluate(
    model: str | Path,
    task: str,
    *,
    split: str = "test",
    samples: int | None = None,
    limit: int | None = None,
    tests: Sequence[str] = (),
    settings: Settings = (),
    name: str | None = None,
    runs: str | Path | None = None,
) -> Evaluation:
    """Held-out accuracy of a model; a call that was cut off continues.

    The arguments are as for `cohort evaluate`; `settings` are dotted path -> value, as after `--set`, of which
    `task.path` says where the data are: a Hub id, a local file or folder. `tests` need the split `test`.
    """
    part, folder = checked_split(split), runs_folder(runs)
    if tests and part != "test":
        raise SpecError(f"`tests` are test problems, so `split` must be test, got '{split}'; leave out one of them")
    counts = {"num_samples": samples, "num_test_prompts" if part == "test" else "num_prompts": limit}
    texts = as_texts(settings) + [f"evaluation.{key}={count}" for key, count in counts.items() if count is not None]
    texts += [f"evaluation.tests=[{', '.join(tests)}]"] if tests else []
    parse_overrides(texts)  # which may fail, before imports that take seconds
    compute_as_a_worker()
    with phase_bar(f"{model} on {task}") as show:
        from ..run.standalone import evaluate_once
        from .result import Evaluation

        spec = evaluated_spec(model, task, texts)
        name = checked_name(name or f"{spec.task.name}-{split}-{spec.digest()[:8]}")
        place = folder / "evaluate" / name
        try:
            found = evaluate_once(spec, part, folder, name, show)
        except KeyboardInterrupt:
            files = (place.glob(f"{split}*.{end}") for end in ("jsonl", "rows"))
            kept = [sum(file.read_bytes().count(b"\n") for file in some) for some in files]
            told = "{:,} problems and {:,} completions of others are kept in {}; the same command continues there."
            raise KeyboardInterrupt(told.format(*kept, place) if any(kept) else "No completion is kept yet.") from None
    measured = spec.tests if part == "test" else {}
    others = {other: Evaluation(on, found[f"test_{other}"], place) for other, on in measured.items()}
    return Evaluation(spec, found[part], place, others)


def evaluated_spec(model: str | Path, task: str, texts: Sequence[str]) -> RunSpec:
    """The settings with which a model, or the policy of a run's folder, is evaluated."""
    defaults = {"model": model_folder(str(model)), "task": task, "algorithm": "grpo"}
    return load_run(None, [*scale_settings(defaults["model"], texts, trains=False), *texts], defaults)


def estimate_runs(source: str, settings: Settings = (), *, runs: str | Path | None = None) -> list[dict[str, Any]]:
    """What `cohort doctor --run` estimates, a document for each run or arm; `problem` if one cannot fit."""
    from ..checks.disk import check_disk, estimate_disk
    from ..checks.memory import judge

    folder, found = runs_folder(runs), []
    for label, spec in runs_of(source, as_texts(settings)).items():
        fit, disk = judge(spec), estimate_disk(spec, "nothing")
        told = {"run": label, "algorithm": spec.algorithm.name, **fit, "disk": disk and asdict(disk)}
        try:
            check_disk(folder, [(spec, folder / "none")], 1, "nothing")
        except ValueError as error:
            told["problem"] = told["problem"] or str(error)
        found.append(told)
    return found


def checked_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise SpecError(f"`name` must be letters, digits, '.', '_' or '-', the first a letter or digit, got '{name}'")
    return name
