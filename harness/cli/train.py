"""`cohort train` and `cohort evaluate`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ..console import terminal
from . import options
from .commands import app, command
from .views.answers import show_evaluation

if TYPE_CHECKING:
    from ..data import EvaluationResult
    from ..run.single import Watch
    from ..run.state import RunResult
    from ..spec.run import RunSpec

EXIT_CODE = {"complete": 0, "stopped": 130}  # by a run's state; 1 for any other


@command(
    app,
    "train",
    "cohort train --set task=arithmetic --set algorithm=grpo --set cold_start.steps=400 --set steps=50",
    "cohort train my_run.yaml --set seed=1",
    "cohort train my_7b_run.yaml --devices 8",
    "torchrun --nproc-per-node 8 -m cohort train my_7b_run.yaml --devices 8",
    "cohort train my_pipeline.yaml --set stages.polish.steps=20",
)
def train(
    spec: Annotated[
        Path | None, typer.Argument(metavar="SPEC.yaml", help="Run file; without one, defaults and --set.")
    ] = None,
    sets: options.Sets = None,
    devices: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="GPUs of the run (processes on a machine without GPU).")
    ] = None,
    name: options.Name = None,
    runs: options.Runs = options.RUNS,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Train one run in RUNS/train/NAME; the same command resumes it. A file with `stages` runs them one after
    another."""
    from ..spec.load import load_run
    from ..spec.raw import read_yaml

    options.use_store(tracking_uri)
    sets = [*(sets or ()), *([] if devices is None else [f"devices={devices}"])]
    if spec is not None and isinstance(raw := read_yaml(spec), dict) and "stages" in raw:
        return _train_pipeline(spec, sets, name, runs, as_json)
    run = load_run(None if spec is None else str(spec), sets)
    name = options.checked_name(name or f"{run.task.name}-{run.algorithm.name}-seed{run.seed}-{run.digest()[:8]}")
    _together([run])
    from ..run.single import train_once  # after the checks, because it takes seconds

    with _watched() as watch:
        result = train_once(run, runs, name, watch)
    if not as_json:
        rows = [(key, terminal.quantity(key, value)) for key, value in result.summary.items()]
        terminal.show_table("", ["quantity", "value"], rows, numeric=["value"])
    _end(name, runs, result, as_json)


def _together(specs: Sequence[RunSpec]) -> None:
    """Run this command in a group of processes if a run has several devices; returns in the one that leads it."""
    from ..ground.machine import in_group

    devices = max(spec.devices for spec in specs)
    if in_group():
        from ..devices.group import join
        from ..run.loop import train as run

        if (group := join()) is not None and group.rank:
            group.follow(run)
            raise typer.Exit()
    elif devices > 1:
        from ..checks.preflight import check_devices
        from ..devices.launch import start

        check_devices(specs)
        raise typer.Exit(start(["-P", "-m", "cohort", *sys.argv[1:]], devices))


@contextmanager
def _watched() -> Iterator[Watch]:
    """Show a run's progress on stderr."""
    from ..console.progress import study_view
    from ..run.single import Watch

    with study_view() as view:
        yield Watch(view.update)


def _train_pipeline(spec: Path, sets: list[str] | None, name: str | None, runs: Path, as_json: bool) -> None:
    """Run a file's stages; exit codes are those of a single run."""
    from ..ground.inputs import digest
    from ..run.pipeline import train_pipeline
    from ..run.stages import load_pipeline

    stages = load_pipeline(spec, sets or ())
    name = options.checked_name(name or f"{spec.stem}-{digest([s.document() for s in stages])[:8]}")
    _together([stage.spec for stage in stages])
    with _watched() as watch:
        result, ended = train_pipeline(stages, runs, name, watch)
    if not as_json:
        keys = ("accuracy_initial", "accuracy_final", "test_accuracy", "rollouts", "seconds")
        rows = []
        for s in ended:
            found = [terminal.quantity(k, s.result.summary[k]) if k in s.result.summary else "" for k in keys]
            rows.append([s.name, s.kind, s.result.state, *found])
        terminal.show_table("", ["stage", "kind", "state", *keys], rows, numeric=keys)
    shown = [{"name": s.name, "kind": s.kind, "directory": s.directory, **vars(s.result)} for s in ended]
    _end(name, runs, result, as_json, stages=shown)


def _end(name: str, runs: Path, result: RunResult, as_json: bool, **more: Any) -> NoReturn:
    """Show how a run ended (`more` only with --json), and exit with the code for it."""
    directory = runs / "train" / name
    if as_json:
        terminal.print_json({"name": name, "directory": directory, **vars(result), **more})
    else:
        terminal.say(f"{name}: {result.state}" + (f" ({result.reason})" if result.reason else ""))
        terminal.say(f"Files: {directory}")
    raise typer.Exit(EXIT_CODE.get(result.state, 1))


@command(
    app,
    "evaluate",
    "cohort evaluate tiny --task arithmetic --set cold_start.steps=400",
    "cohort evaluate runs/train/my-run --task arithmetic --samples 8",
    "cohort evaluate Qwen/Qwen2.5-0.5B --task math500 --path data/math500 --json",
)
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="'tiny', a Hub id, a model folder or a checkpoint.")],
    task: Annotated[str, typer.Option(help="Task by name.")],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    path: options.DataPath = None,
    samples: Annotated[int | None, typer.Option(min=1, metavar="K", help="Samples per problem (K).")] = None,
    sets: options.Sets = None,
    name: options.Name = None,
    runs: options.Runs = options.RUNS,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Measure held-out accuracy: greedy, mean of K samples, pass@k and majority of K, with 95 % intervals.

    With 16 or more samples, --json has every pass@k and Cover@tau with intervals over the problems. Metrics and the
    first graded completions go to MLflow's experiment `evaluate`; all completions go to RUNS/evaluate/NAME, and the
    same command continues there after a kill. On a GPU, a model other than `tiny` runs with autocast and, if it is
    installed, the engine vllm; a line lists these settings, and --set overrides them.
    """
    from ..data import InvalidRun

    options.use_store(tracking_uri)
    try:
        spec, directory, result = evaluated(model, task, split, path, samples, sets, name, runs)
    except InvalidRun as error:
        terminal.fail(error)
        raise typer.Exit(1) from None
    if as_json:
        from ..run.evaluate import intervals

        given = {"model": model, "task": task, "split": split, "spec": spec.model_dump(mode="json")}
        found = {"metrics": result.metrics, "intervals": intervals(result), "breakdown": result.breakdown}
        counts, k = result.correct_counts, int(result.metrics["num_samples"])
        found["curves"] = importlib.import_module("cohort.reports.capability").curves_of_counts(
            list(counts.values()), k
        )
        rows = {"correct_counts": counts, "samples": result.samples[:16]}
        terminal.print_json({**given, **found, **rows, "directory": directory})
        return
    show_evaluation(f"{model} on {task} ({split})", result)
    terminal.say(f"Files: {directory}")


def evaluated(
    model: str,
    task: str,
    split: str,
    path: str | None,
    samples: int | None,
    sets: list[str] | None,
    name: str | None,
    runs: Path,
) -> tuple[RunSpec, Path, EvaluationResult]:
    """The run spec of an evaluation, the folder of its completions, and its result; shows progress."""
    from ..console.progress import phase_bar

    part = options.checked_split(split)
    extra = [] if samples is None else [f"evaluation.num_samples={samples}"]
    with phase_bar(f"{model} on {task}") as show:  # before imports that take seconds
        from ..api.scale import scale_settings
        from ..record.finished import model_folder
        from ..run.single import evaluate_once
        from ..spec.load import load_run

        defaults = {"model": model_folder(model), "task": task, "algorithm": "grpo"}
        scale = scale_settings(defaults["model"], sets, trains=False)
        spec = load_run(None, [*(sets or ()), *scale, *options.data_path(path), *extra], defaults)
        name = options.checked_name(name or f"{spec.task.name}-{split}-{spec.digest()[:8]}")
        return spec, runs / "evaluate" / name, evaluate_once(spec, part, runs, name, show)
