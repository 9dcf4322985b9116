"""`cohort study plan`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from .. import api
from ..console import terminal
from . import options
from .commands import command, study_app

if TYPE_CHECKING:
    from ..api.planner import Option


@command(
    study_app,
    "plan",
    "cohort study plan quickstart",
    "cohort study plan my_study.yaml --hours 8",
    "cohort study plan group_size --flops 1e15 --workers 2",
    "cohort study plan quickstart --power 0.02",
)
def study_plan(
    study: options.Study,
    hours: Annotated[float | None, typer.Option(metavar="H", help="Hours from the start to the report.")] = None,
    flops: Annotated[
        float | None, typer.Option(metavar="F", help="Operations of all trials, including evaluations.")
    ] = None,
    power: Annotated[
        float | None, typer.Option(metavar="D", help="Difference to detect with probability 0.8; 0.02 is 2 points.")
    ] = None,
    spread: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Standard deviation of a difference over seeds; by default estimated from complete trials.",
        ),
    ] = None,
    workers: options.Workers = "auto",
    sets: options.Sets = None,
    runs: options.Runs = options.RUNS,
    as_json: options.Json = False,
) -> None:
    """Measure a few steps of a study, then predict its cost and propose steps and seeds.

    Without --hours, --flops and --power it prints the cost of the study as it is. It runs the study itself, cut to 10
    steps per arm, and keeps only the cold starts, which the study needs.
    """
    count, runs = options.num_workers(workers), runs.resolve()
    chosen = api.load_study(study, sets or ())
    found = api.plan(
        chosen, hours=hours, flops=flops, power=power, spread=spread, workers=count, runs=runs
    )  # fmt: skip
    own, best, known, metric = found.as_it_is, found.best, found.spread, chosen.spec.metric
    if as_json:
        terminal.print_json({"study": chosen.name, **found.document()})
        raise typer.Exit(0 if best is not None else 1)
    terminal.say(f"Measured in {terminal.duration(found.measured.seconds)} with {found.measured.workers} workers.")
    rows = [_row("as it is", own, metric)]
    rows += [_row("proposed" if one is best else "", one, metric) for one in found.options]
    headers = ["", "steps", "seeds", "trials", "time", "hours of cores or GPUs", "operations", "detectable difference"]
    terminal.show_table(f"{chosen.name}: {' '.join(chosen.question.split())}", headers, rows, numeric=headers[1:])
    if known is None:
        terminal.say("The detectable difference needs the spread over seeds: run two seeds, or give --spread.")
    else:
        spread_text = _difference(known.deviation, metric)
        terminal.say(f"Detected with probability 0.8, given a spread of {spread_text} over seeds ({known.source}).")
    if best is own:
        return
    if best is None:
        terminal.say("Not even 2 seeds fit.")
        raise typer.Exit(1)
    change = "" if best.steps is None or best.factor == 1 else f" --set steps={best.steps}"
    seeds = ",".join(map(str, range(best.seeds)))
    again = "".join(f" --set {shlex.quote(one)}" for one in sets or ())
    how = f"--seeds {seeds} --workers {found.measured.workers}"
    terminal.say(f"Run it: cohort study run {shlex.quote(study)}{again}{change} {how}")


def _row(name: str, one: Option, metric: str) -> list[str]:
    steps = "as in the file" if one.steps is None else str(one.steps)
    if one.steps is None and one.factor != 1:
        steps = f"{one.factor:g} times"
    flops = "-" if one.flops is None else f"{one.flops:.3g}"
    found = "-" if one.detectable is None else _difference(one.detectable, metric)
    units = f"{one.units / 3600:.3g}"
    return [name, steps, str(one.seeds), str(one.trials), terminal.duration(one.seconds), units, flops, found]


def _difference(value: float, metric: str) -> str:
    return f"{100 * value:.2g} points" if "accuracy" in metric else f"{value:.3g}"
