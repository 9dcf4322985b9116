"""`cohort train`, `cohort evaluate` and `cohort register`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .. import api
from ..console import terminal
from . import options
from .commands import app, command
from .views.answers import show_evaluation

EXIT_CODE = {"complete": 0, "stopped": 130}  # by a run's state; 1 for any other


@command(
    app,
    "train",
    "cohort train --set task=arithmetic --set algorithm=grpo --set cold_start.steps=400 --set steps=50",
    "cohort train my_run.yaml --set seed=1",
    "cohort train my_7b_run.yaml --set devices=8",
    "torchrun --nproc-per-node 8 -m cohort train my_7b_run.yaml --set devices=8",
    "cohort train my_pipeline.yaml --set stages.polish.steps=20",
)
def train(
    spec: Annotated[
        Path | None, typer.Argument(metavar="SPEC.yaml", help="Run file; without one, defaults and --set.")
    ] = None,
    sets: options.Sets = None,
    name: options.Name = None,
    runs: options.Runs = options.RUNS,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Train one run in RUNS/train/NAME; the same command resumes it. A file with `stages` runs them one after
    another."""
    options.use_store(tracking_uri)
    ended = api.train(spec, sets or (), name=name, runs=runs, command=sys.argv[1:])
    result = ended.result
    if as_json:
        stages = {} if ended.stages is None else {"stages": ended.stages}
        terminal.print_json({"name": ended.name, "directory": ended.directory, **vars(result), **stages})
        raise typer.Exit(EXIT_CODE.get(result.state, 1))
    if ended.stages is None:
        rows = [(key, terminal.quantity(key, value)) for key, value in result.summary.items()]
        terminal.show_table("", ["quantity", "value"], rows, numeric=["value"])
    else:
        keys = ("accuracy_initial", "accuracy_final", "test_accuracy", "rollouts", "seconds")
        rows = []
        for one in ended.stages:
            found = [terminal.quantity(k, one["summary"][k]) if k in one["summary"] else "" for k in keys]
            rows.append([one["name"], one["kind"], one["state"], *found])
        terminal.show_table("", ["stage", "kind", "state", *keys], rows, numeric=keys)
    terminal.say(f"{ended.name}: {result.state}" + (f" ({result.reason})" if result.reason else ""))
    terminal.say(f"Files: {ended.directory}")
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
        spec, directory, result = api.evaluated(
            model, task, split=split, path=path, samples=samples, settings=sets or (), name=name, runs=runs
        )
    except InvalidRun as error:
        terminal.fail(error)
        raise typer.Exit(1) from None
    if as_json:
        given = {"model": model, "task": task, "split": split}
        terminal.print_json({**given, **api.evaluation_document(spec, result), "directory": directory})
        return
    show_evaluation(f"{model} on {task} ({split})", result)
    terminal.say(f"Files: {directory}")


@command(app, "register", "cohort register runs/train/my-run --name arithmetic-grpo")
def register(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="RUNS/train/NAME or RUNS/studies/NAME/trials/TRIAL.")],
    name: Annotated[str, typer.Option(metavar="NAME", help="The model's name in MLflow's registry.")],
    runs: options.Runs = options.RUNS,
    tracking_uri: options.TrackingUri = None,
) -> None:
    """Register the final policy of a run as a version of a model in MLflow.

    The version links to the run and names its files, which stay where they are; an MLflow server gets a copy. A trial
    of a study keeps its policy with checkpoints.finished=weights, a single run by default.
    """
    options.use_store(tracking_uri)
    version, policy = api.register(run, name, runs=runs)
    terminal.say(f"{name}, version {version}: {policy}")
