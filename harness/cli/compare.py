"""`cohort compare`: a study of algorithms without a study file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .commands import app, command
from .study import run_and_report, show_dry_run

if TYPE_CHECKING:
    from ..spec.study import StudySpec

TINY_COLD_START = 400


@command(
    app,
    "compare",
    "cohort compare --algorithms ppo,grpo --task arithmetic --steps 50",
    "cohort compare --algorithms ppo,grpo,grpo_self_consistency --task gsm8k --path data/gsm8k --steps 5 --dry-run",
    "cohort compare --algorithms grpo,ppo --task gsm8k --model Qwen/Qwen2.5-0.5B --seeds 0,1",
    "cohort compare --algorithms grpo,ppo --task arithmetic --tune 6",
    "cohort compare --algorithms grpo,dapo --task arithmetic --controls random,frozen",
)
def compare(
    algorithms: Annotated[str, typer.Option(metavar="A,B,...", help="Algorithms; the first is the baseline.")],
    task: Annotated[str, typer.Option(metavar="A,B,...", help="Tasks by name; every algorithm trains on each.")],
    model: Annotated[str, typer.Option(help="'tiny', a Hub id or a local folder.")] = "tiny",
    seeds: options.Seeds = None,
    steps: Annotated[int | None, typer.Option(min=0, metavar="N", help="Training steps of each trial.")] = None,
    tune: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="First tune each algorithm's learning rate over N settings.")
    ] = None,
    controls: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Control arms: random, format_only, inverted, shuffled_gold, frozen."),
    ] = None,
    sets: options.Sets = None,
    name: options.Name = None,
    workers: options.Workers = "auto",
    interleave: options.Interleave = None,
    path: options.DataPath = None,
    dry_run: options.DryRun = False,
    runs: options.Runs = options.RUNS,
    tracking_uri: options.TrackingUri = None,
    as_json: options.Json = False,
) -> None:
    """Run one study with an arm per algorithm (and task) and all else equal.

    The model 'tiny' gets a supervised cold start of 400 steps (--set cold_start.steps=N for another). With --tune each
    algorithm first gets the same search over its learning rate (a fifth to five times the run's own), judged on the
    validation split with a separate seed; a study file can search more settings. --controls adds arms of the first
    algorithm with another reward (or no learning: frozen), and the report says which gains they reproduce.

    Any other model gets lower learning rates (1e-6; 1e-5 with --set lora.rank=N and for a critic) and, on a GPU,
    autocast and the engine vllm if it is installed. A line lists these settings before the run; --set overrides them.
    """
    from ..api.scale import scale_settings

    options.use_store(tracking_uri)
    sets = [*options.data_path(path), *(sets or ()), *scale_settings(model, sets)]
    study = comparison(algorithms, task, model, seeds, steps, sets, name, tune, interleave, controls)
    if dry_run:
        return show_dry_run(study, runs, options.num_workers(workers), None, None, as_json)
    given = {"--algorithms": algorithms, "--task": task, "--model": model, "--seeds": seeds, "--steps": steps}
    given |= {"--tune": tune, "--controls": controls, "--set": sets, "--name": name, "--interleave": interleave}
    command = options.shell("compare", given)
    run_and_report(study, runs, options.num_workers(workers), command, as_json)


def comparison(
    algorithms: str,
    task: str,
    model: str,
    seeds: str | None,
    steps: int | None,
    sets: Sequence[str] | None,
    name: str | None,
    tune: int | None = None,
    interleave: int | None = None,
    controls: str | None = None,
) -> StudySpec:
    """The study that `cohort compare` runs: one arm for each algorithm and task, with all else equal."""
    from ..spec.raw import parse_overrides, with_overrides
    from ..spec.run import Optimizer
    from ..spec.study import parse_study

    run: dict[str, Any] = {"model": model}
    if model == "tiny":
        run["cold_start"] = {"steps": TINY_COLD_START}
    if steps is not None:
        run["steps"] = steps
    names = _distinct("--algorithms", algorithms, "ppo,grpo")
    tasks = _distinct("--task", task, "gsm8k,svamp")
    run = with_overrides(run, parse_overrides(sets or ()))
    raw: dict[str, Any] = {
        "name": name or f"compare-{'-'.join(tasks)}",
        "question": f"Which of {', '.join(names)} learns {' and '.join(tasks)} best from the same start with the same "
        "rollouts?",
        "run": run,
        "design": "compare",
        "compare": {"algorithms": names, "tasks": tasks},
        "seeds": [0, 1, 2] if seeds is None else options.integers(seeds),
        "interleave": interleave,
    }
    if controls is not None:
        raw["compare"]["controls"] = _distinct("--controls", controls, "random,frozen")
    if tune is not None:
        rate = Optimizer.model_validate(run.get("optimizer", {})).learning_rate
        space = {"optimizer.learning_rate": {"low": rate / 5, "high": rate * 5, "log": True}}
        raw["search"] = {"space": space, "trials": tune, "seeds": [max(raw["seeds"]) + 1]}
    return parse_study(raw, where="cohort compare")


def _distinct(option: str, text: str, example: str) -> list[str]:
    names = [word.strip() for word in text.split(",")]
    if len(set(names)) != len(names) or not all(names):
        raise ValueError(f"{option} must be distinct names separated by commas, such as {example}, got '{text}'")
    return names
