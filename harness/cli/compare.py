"""`cohort compare`: a study of algorithms without a study file."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import api
from . import options
from .commands import app, command
from .study import run_and_show, show_dry_run


@command(
    app,
    "compare",
    "cohort compare --algorithms ppo,grpo --task arithmetic --set steps=50",
    "cohort compare --algorithms ppo,grpo,grpo_self_consistency --task gsm8k --path data/gsm8k --set steps=5 --dry-run",
    "cohort compare --algorithms grpo,ppo --task gsm8k --model Qwen/Qwen2.5-0.5B --seeds 0,1",
    "cohort compare --algorithms grpo,ppo --task arithmetic --tune 6",
    "cohort compare --algorithms grpo,dapo --task arithmetic --controls random,frozen",
)
def compare(
    algorithms: Annotated[str, typer.Option(metavar="A,B,...", help="Algorithms; the first is the baseline.")],
    task: Annotated[str, typer.Option(metavar="A,B,...", help="Tasks by name; every algorithm trains on each.")],
    model: Annotated[str, typer.Option(help="'tiny', a Hub id or a local folder.")] = "tiny",
    seeds: options.Seeds = None,
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
    options.use_store(tracking_uri)
    count = options.num_workers(workers)
    study = api.comparison(
        options.words(algorithms), options.words(task), model, seeds=options.integers(seeds or "0,1,2"), tune=tune,
        controls=options.words(controls or ""), settings=[*options.data_path(path), *(sets or ())], name=name,
    )  # fmt: skip
    if dry_run:
        return show_dry_run(study, runs, count, as_json)
    run_and_show(study, runs, count, as_json)
