"""Single runs: train one, evaluate a model, keep a policy in MLflow's registry."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from ..data import EvaluationResult, Split
from ..ground.machine import in_group
from ..spec.errors import SpecError
from .scale import scale_settings
from .settings import Settings, as_texts, runs_folder

if TYPE_CHECKING:
    from ..run.state import RunResult
    from ..spec.run import RunSpec
    from .result import Evaluation


@dataclass(frozen=True)
class Trained:
    """How a run ended. `stages` has name, kind, folder and result of each stage that began, for a file of stages."""

    name: str
    directory: Path
    result: RunResult
    stages: Sequence[Mapping[str, Any]] | None = None


def train(
    spec: str | Path | None = None,
    settings: Settings = (),
    *,
    name: str | None = None,
    runs: str | Path | None = None,
    command: Sequence[str] | None = None,
) -> Trained:
    """Train one run in RUNS/train/NAME, from a file or from settings alone; the same call resumes it.

    A file with `stages` runs them one after another. Shows progress; Ctrl-C stops it after its step. A run with several
    devices needs a group of processes: `command`, the words after `cohort` that ask for this run, starts one.
    """
    from ..console.progress import study_view
    from ..ground.inputs import digest
    from ..spec.load import load_run
    from ..spec.raw import read_yaml

    folder, texts = runs_folder(runs), as_texts(settings)
    if spec is not None and isinstance(raw := read_yaml(Path(spec)), dict) and "stages" in raw:
        from ..run.pipeline import load_pipeline, train_pipeline

        stages = load_pipeline(Path(spec), texts)
        name = checked_name(name or f"{Path(spec).stem}-{digest([s.document() for s in stages])[:8]}")
        _in_its_group([stage.spec for stage in stages], command)
        with study_view() as view:
            result, ended = train_pipeline(stages, folder, name, view.update)
        return Trained(name, folder / "train" / name, result, ended)
    run = load_run(None if spec is None else str(spec), texts)
    name = checked_name(name or f"{run.task.name}-{run.algorithm.name}-seed{run.seed}-{run.digest()[:8]}")
    _in_its_group([run], command)
    from ..run.single import train_once  # after the checks, because it takes seconds

    with study_view() as view:
        return Trained(name, folder / "train" / name, train_once(run, folder, name, view.update))


def _in_its_group(specs: Sequence[RunSpec], command: Sequence[str] | None) -> None:
    """Return in the process that leads the runs; all others end here, and so does this one if it starts a group."""
    devices = max(spec.devices for spec in specs)
    if in_group():
        from ..devices.group import join
        from ..run.loop import train as run

        if (group := join()) is not None and group.rank:
            group.follow(run)
            raise SystemExit(0)
    elif devices > 1:
        from ..checks.preflight import check_devices
        from ..devices.launch import start

        check_devices(specs)
        if command is None:
            raise SpecError(f"devices={devices} needs a group of processes: use `cohort train`, or start with torchrun")
        raise SystemExit(start(["-P", "-m", "cohort", *command], devices))


def evaluate(
    model: str | Path,
    task: str,
    *,
    split: str = "test",
    path: str | Path | None = None,
    samples: int | None = None,
    settings: Settings = (),
    name: str | None = None,
    runs: str | Path | None = None,
) -> Evaluation:
    """Held-out accuracy of a model, as `cohort evaluate` measures it; a call that was cut off continues.

    The arguments:

        model     `tiny`, a Hub id, a model folder, a checkpoint, or the folder of a run
        task      by name; `path` says where its data are: a Hub id, a local file or folder
        split     train, validation or test
        samples   completions of each problem
        settings  dotted path -> value, as after `--set`
        name      of the folder RUNS/evaluate/NAME that keeps every completion
    """
    from ..run.evaluate import intervals
    from .result import Evaluation

    _, directory, result = evaluated(
        str(model), task, split=split, path=path, samples=samples, settings=settings, name=name, runs=runs
    )
    return Evaluation(result, intervals(result), directory)


def evaluated(
    model: str,
    task: str,
    *,
    split: str = "test",
    path: str | Path | None = None,
    samples: int | None = None,
    settings: Settings = (),
    name: str | None = None,
    runs: str | Path | None = None,
) -> tuple[RunSpec, Path, EvaluationResult]:
    """The run spec of an evaluation, the folder of its completions, and its result; shows progress."""
    from ..console.progress import phase_bar

    part, folder = checked_split(split), runs_folder(runs)
    texts = as_texts(settings) + ([] if samples is None else [f"evaluation.num_samples={samples}"])
    with phase_bar(f"{model} on {task}") as show:  # before imports that take seconds
        from ..record.finished import model_folder
        from ..run.single import evaluate_once
        from ..spec.load import load_run

        defaults = {"model": model_folder(model), "task": task, "algorithm": "grpo"}
        scale = scale_settings(defaults["model"], texts, trains=False)
        spec = load_run(None, [*scale, *data_path(path), *texts], defaults)
        name = checked_name(name or f"{spec.task.name}-{split}-{spec.digest()[:8]}")
        return spec, folder / "evaluate" / name, evaluate_once(spec, part, folder, name, show)


def evaluation_document(spec: RunSpec, result: EvaluationResult) -> dict[str, Any]:
    """An evaluation in full: metrics, intervals, pass@k and Cover@tau curves, scores by problem, a few completions."""
    from ...reports.capability import curves_of_counts
    from ..run.evaluate import intervals

    counts, k = result.correct_counts, int(result.metrics["num_samples"])
    return {
        "spec": spec.model_dump(mode="json"), "metrics": result.metrics, "intervals": intervals(result),
        "breakdown": result.breakdown, "curves": curves_of_counts(list(counts.values()), k),
        "correct_counts": counts, "samples": result.samples[:16],
    }  # fmt: skip


def probe(
    model: str | Path,
    task: str,
    *,
    split: str = "test",
    reference: str = "validation",
    num_problems: int = 500,
    settings: Settings = (),
    name: str | None = None,
    runs: str | Path | None = None,
) -> dict[str, Any]:
    """What a model knows of a benchmark's questions beyond those of `reference`; shows progress."""
    from ..console.progress import phase_bar
    from ..record.finished import model_folder
    from ..spec.load import load_run
    from .contamination import probe_contamination

    defaults = {"model": model_folder(str(model)), "task": task, "algorithm": "grpo"}
    texts = as_texts(settings)
    spec = load_run(None, [*texts, *scale_settings(defaults["model"], texts, trains=False)], defaults)
    part, name = checked_split(split), name and checked_name(name)
    with phase_bar(f"{spec.model} on {spec.task.name}") as show:
        return probe_contamination(
            spec, runs_folder(runs), name, split=part, reference=reference, num_problems=num_problems, on_progress=show
        )


def register(run: str | Path, name: str, *, runs: str | Path | None = None) -> tuple[int, Path]:
    """Register the final policy of a run in MLflow's registry; returns the version and the folder of the policy."""
    from ..mirror.models import register_policy
    from ..mirror.store import check_runs_folder
    from ..record.finished import model_folder

    folder, name = runs_folder(runs), checked_name(name)
    check_runs_folder(folder)
    policy = Path(model_folder(str(run)))
    return register_policy(folder, Path(run), policy, name), policy


def estimate_runs(source: str, settings: Settings = (), *, runs: str | Path | None = None) -> list[dict[str, Any]]:
    """Memory and disk that each run of a file, or a trial of each arm of a study, needs; `problem` if one cannot
    fit."""
    from ..checks.disk import check_disk, estimate_disk
    from ..checks.memory import judge
    from ..spec.load import runs_of

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


def data_path(path: str | Path | None) -> list[str]:
    """Where the task's data are, as a setting."""
    return [] if path is None else [f"task.path={json.dumps(str(path))}"]


def checked_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise SpecError(f"--name must be letters, digits, '.', '_' or '-', the first a letter or digit, got '{name}'")
    return name


def checked_split(split: str) -> Split:
    if split not in get_args(Split):
        raise SpecError(f"--split must be one of {', '.join(get_args(Split))}, got '{split}'")
    return cast("Split", split)
