"""`cohort study plan`: what a study costs, and how many seeds a budget buys."""

import shlex
from dataclasses import asdict
from typing import Annotated

import typer

from ...cli import options
from ...cli.commands import command
from ...console import terminal


@command(
    "study plan",
    "cohort study plan quickstart",
    "cohort study plan my_study.yaml --hours 8",
    "cohort study plan group_size --flops 1e15 --workers 2",
    "cohort study plan quickstart --power 0.02",
)
def study_plan(
    study: options.Study,
    hours: Annotated[float | None, typer.Option(metavar="H", help="Hours from the start to the report.")] = None,
    flops: Annotated[float | None, typer.Option(metavar="F", help="Operations of all trials, evaluations too.")] = None,
    power: Annotated[
        float | None, typer.Option(metavar="D", help="Difference to detect with probability 0.8; 0.02 is 2 points.")
    ] = None,
    spread: Annotated[
        float | None,
        typer.Option(metavar="S", help="Standard deviation of a difference over seeds; by default of complete trials."),
    ] = None,
    workers: options.Workers = "auto",
    sets: options.Sets = None,
    runs: options.Runs = options.RUNS,
    as_json: options.Json = False,
) -> None:
    """Measure a few steps of a study, then predict its cost and propose a number of seeds.

    Without --hours, --flops and --power it prints the cost of the study as it is. It runs the study itself, cut to 10
    steps per arm, and keeps only the cold starts, which the study needs.
    """
    from ...api import load_study
    from .planner import plan

    chosen = load_study(study, sets or ())
    limits = {"hours": hours, "flops": flops, "power": power}
    found = plan(chosen, **limits, spread=spread, workers=options.num_workers(workers), runs=runs)
    metric, limited = chosen.spec.metric, any(limits.values())
    if as_json:
        terminal.print_json({"study": chosen.name, **asdict(found)})
        raise typer.Exit(0 if found.proposed is not None else 1)
    terminal.say(f"Measured in {terminal.duration(found.measured_seconds)} with {found.workers} workers.")
    headers = ["", "seeds", "trials", "time", "hours of trials", "operations", "detectable difference"]
    rows = []
    for name, one in {"as it is": found.as_it_is, **({"proposed": found.proposed} if limited else {})}.items():
        if one is not None:
            costs = [terminal.duration(one.seconds), f"{one.trial_seconds / 3600:.3g}"]
            costs += ["-" if one.flops is None else f"{one.flops:.3g}"]
            detectable = "-" if one.detectable is None else _difference(one.detectable, metric)
            rows.append([name, one.seeds, one.trials, *costs, detectable])
    terminal.show_table(f"{chosen.name}: {' '.join(chosen.question.split())}", headers, rows, numeric=headers[1:])
    if found.spread is None:
        terminal.say("The detectable difference needs the spread over seeds: run two seeds, or give --spread.")
    else:
        spread_text = _difference(found.spread, metric)
        terminal.say(f"Detected with probability 0.8, given a spread of {spread_text} over seeds.")
    if found.proposed is None:
        terminal.say("No number of seeds from 2 to 200 fits.")
        raise typer.Exit(1)
    if limited:
        again = "".join(f" --set {shlex.quote(one)}" for one in sets or ())
        seeds = ",".join(map(str, range(found.proposed.seeds)))
        terminal.say(f"Run it: cohort study run {shlex.quote(study)}{again} --seeds {seeds} --workers {found.workers}")


def _difference(value: float, metric: str) -> str:
    return f"{100 * value:.2g} points" if "accuracy" in metric else f"{value:.3g}"
