"""`cohort train`, `cohort evaluate` and `cohort reward-model train`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from harness.cli import views
from harness.cli.commands import app, command, reward_app
from harness.cli.options import RUNS, DataPath, Json, Name, Runs, Sets, TrackingUri, checked_name, data_path, use_store
from harness.console import terminal

if TYPE_CHECKING:
    from harness.runs.single import Watch
    from harness.types import Split


@command(
    app,
    "train",
    "cohort train --set task=arithmetic --set algorithm=grpo --set cold_start.steps=400 --set steps=50",
    "cohort train my_run.yaml --set seed=1",
    "cohort train my_pipeline.yaml --set stages.polish.steps=20",
)
def train(
    spec: Annotated[Path | None, typer.Argument(metavar="SPEC.yaml", help="Run file; without it, --set alone.")] = None,
    sets: Sets = None,
    name: Name = None,
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
    as_json: Json = False,
) -> None:
    """Train once, in RUNS/train/NAME; the same command resumes. A file with `stages` runs them one after another."""
    use_store(tracking_uri)
    from harness.spec.load import load_run

    if spec is not None and _lists_stages(spec):
        return _train_pipeline(spec, sets, name, runs, as_json)
    run = load_run(None if spec is None else str(spec), sets or ())
    name = checked_name(name or f"{run.task.name}-{run.algorithm.name}-seed{run.seed}-{run.digest()[:8]}")
    from harness.runs.single import train_once

    directory = runs / "train" / name
    with _watched() as watch:
        result = train_once(run, runs, name, watch)
    if as_json:
        terminal.print_json({"name": name, "directory": directory, **vars(result)})
    else:
        rows = [(key, terminal.quantity(key, value)) for key, value in result.summary.items()]
        terminal.show_table("", ["quantity", "value"], rows, numeric=["value"])
        terminal.say(f"{name}: {result.state}" + (f" ({result.reason})" if result.reason else ""))
        terminal.say(f"Files: {directory}")
    raise typer.Exit({"complete": 0, "stopped": 130}.get(result.state, 1))


@contextmanager
def _watched() -> Iterator[Watch]:
    """Shows on stderr how far a run is, and that Ctrl-C was heard."""
    from harness.console.progress import study_view
    from harness.runs.single import Watch

    def say_stopping() -> None:
        terminal.say("Stopping after this step; Ctrl-C again stops at once.", stderr=True)

    with study_view() as view:
        yield Watch(view.update, say_stopping)


def _lists_stages(spec: Path) -> bool:
    from harness.spec.raw import read_yaml

    raw = read_yaml(spec)
    return isinstance(raw, dict) and "stages" in raw


def _train_pipeline(spec: Path, sets: list[str] | None, name: str | None, runs: Path, as_json: bool) -> None:
    """Run a file's stages; exit code as of one run."""
    from harness.runs.pipeline import train_pipeline
    from harness.runs.stages import load_pipeline, pipeline_digest

    stages = load_pipeline(spec, sets or ())
    name = checked_name(name or f"{spec.stem}-{pipeline_digest(stages)[:8]}")
    with _watched() as watch:
        result, ended = train_pipeline(stages, runs, name, watch)
    directory = runs / "train" / name
    if as_json:
        shown = [{"name": s.name, "kind": s.kind, "directory": s.directory, **vars(s.result)} for s in ended]
        terminal.print_json({"name": name, "directory": directory, **vars(result), "stages": shown})
    else:
        keys = ("accuracy_initial", "accuracy_final", "test_accuracy", "rollouts", "seconds")
        rows = [
            (
                s.name,
                s.kind,
                s.result.state,
                *(terminal.quantity(k, v) if (v := s.result.summary.get(k)) is not None else "" for k in keys),
            )
            for s in ended
        ]
        terminal.show_table("", ["stage", "kind", "state", *keys], rows, numeric=keys)
        terminal.say(f"{name}: {result.state}" + (f" ({result.reason})" if result.reason else ""))
        terminal.say(f"Files: {directory}")
    raise typer.Exit({"complete": 0, "stopped": 130}.get(result.state, 1))


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
    path: DataPath = None,
    samples: Annotated[int | None, typer.Option(min=1, metavar="K", help="Samples of each problem.")] = None,
    sets: Sets = None,
    name: Name = None,
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
    as_json: Json = False,
) -> None:
    """Measure held-out accuracy: greedy, mean of K samples, pass@k and majority of K, with 95 % intervals.

    Metrics and all graded completions go to MLflow's experiment `evaluate` and to RUNS/evaluate/NAME.
    """
    use_store(tracking_uri)
    from harness.console.progress import phase_bar
    from harness.runs.single import evaluate_once, model_folder
    from harness.spec.errors import SpecError
    from harness.spec.load import load_run
    from harness.types import InvalidRun, Split

    if split not in get_args(Split):
        raise SpecError(f"--split must be one of {', '.join(get_args(Split))}, got '{split}'")
    extra = [] if samples is None else [f"evaluation.num_samples={samples}"]
    defaults = {"model": model_folder(model), "task": task, "algorithm": "grpo"}
    spec = load_run(None, [*(sets or ()), *data_path(path), *extra], defaults)
    name = checked_name(name or f"{spec.task.name}-{split}-{spec.digest()[:8]}")
    try:
        with phase_bar(f"{spec.model} on {spec.task.name}") as show:
            result = evaluate_once(spec, cast("Split", split), runs, name, show)
    except InvalidRun as error:
        terminal.fail(error)
        raise typer.Exit(1) from None
    if as_json:
        document = {"model": model, "task": task, "split": split, "spec": spec.model_dump(mode="json")}
        terminal.print_json(
            {
                **document,
                "metrics": result.metrics,
                "intervals": views.intervals(result),
                "breakdown": result.breakdown,
                "correct_counts": result.correct_counts,
                "samples": result.samples[:16],
                "directory": runs / "evaluate" / name,
            }
        )
        return
    views.show_evaluation(f"{model} on {task} ({split})", result)
    terminal.say(f"Files: {runs / 'evaluate' / name}")


@command(
    reward_app,
    "train",
    "cohort reward-model train runs/train/my-run --model tiny --out models/reward",
    "cohort reward-model train runs/studies/my-study/trials/* --model runs/train/my-run --out reward --by correct",
)
def reward_model_train(
    rollouts: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or files of rollouts.")],
    model: Annotated[str, typer.Option(help="Where the fit starts: 'tiny', a Hub id, a model folder or a run.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder for the reward model.")],
    by: Annotated[str, typer.Option(help="What ranks completions: reward, correct, or one of the rewards.")] = "reward",
    epochs: Annotated[int, typer.Option(min=1, metavar="N", help="Passes over the pairs.")] = 3,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts per optimiser step.")] = 16,
    learning_rate: Annotated[float, typer.Option(min=0.0, metavar="RATE", help="Of AdamW, constant.")] = 1e-4,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Data order and initial head.")] = 0,
    as_json: Json = False,
) -> None:
    """Fit a Bradley-Terry reward model on ranked rollouts (RLHF's second step).

    Use it with --set rewards.reward_model.path=DIR.
    """
    from harness.console.progress import phase_bar
    from harness.policy.bradley_terry import train_reward_model
    from harness.runs.single import model_folder

    with phase_bar("reward model") as bar:
        fit = train_reward_model(
            rollouts,
            model_folder(model),
            out,
            by=by,
            epochs=epochs,
            prompts_per_batch=batch,
            learning_rate=learning_rate,
            seed=seed,
            on_progress=lambda done, total: bar("fit", done, total),
        )
    if as_json:
        terminal.print_json({"directory": out, **vars(fit)})
        return
    views.show_reward_model(fit)
    terminal.say(f"Use it: --set rewards.reward_model.path={shlex.quote(str(out))}")
