"""`cohort study plan`."""

from __future__ import annotations

import importlib
import math
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import terminal
from . import options
from .commands import command, study_app

if TYPE_CHECKING:
    from ..study.planner import Option


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
    from ..api.report import write_report
    from ..study import planner
    from .study import _load_study

    limits = {"--hours": hours, "--flops": flops, "--power": power, "--spread": spread}
    for name, value in limits.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a number above 0, got {value:g}")
    if len(given := [name for name in ("--hours", "--flops", "--power") if limits[name] is not None]) > 1:
        raise ValueError(
            f"only one of --hours, --flops and --power can be given, got {' and '.join(given)}; leave one out"
        )
    spec, count, runs = _load_study(study, sets, None), options.num_workers(workers), runs.resolve()
    if given and spec.searches():
        raise ValueError(
            f"{given[0]} must be left out for a study that searches or tunes: its file sets the number of trials"
        )
    known = planner.Spread(spread, "as given") if spread is not None else planner.spread_of(spec, runs)
    if power is not None and known is None:
        raise ValueError(
            "--power needs the spread over seeds, but the runs folder has no two complete seeds of these arms; give "
            "--spread, such as 0.02"
        )
    measured = planner.calibrate(spec, runs, count, write_report)
    detectable = importlib.import_module("cohort.reports.statistics").minimum_detectable_difference
    own = planner.option(spec, measured, spec.most_seeds, 1.0, known, detectable)
    found = planner.options_within(spec, measured, known, detectable, hours=hours, flops=flops, power=power)
    best = planner.proposed(found) if given else own
    if as_json:
        terminal.print_json({
            "study": spec.name, "measured_seconds": measured.seconds, "workers": measured.workers,
            "spread": known and asdict(known), "as_it_is": asdict(own),
            "options": [asdict(one) for one in found] if given else [], "proposed": best and asdict(best),
        })  # fmt: skip
        raise typer.Exit(0 if best is not None else 1)
    terminal.say(f"Measured in {terminal.duration(measured.seconds)} with {measured.workers} workers.")
    rows = [_row("as it is", own, spec.metric)]
    rows += [_row("proposed" if one is best else "", one, spec.metric) for one in (found if given else ())]
    headers = ["", "steps", "seeds", "trials", "time", "hours of cores or GPUs", "operations", "detectable difference"]
    terminal.show_table(f"{spec.name}: {' '.join(spec.question.split())}", headers, rows, numeric=headers[1:])
    if known is None:
        terminal.say("The detectable difference needs the spread over seeds: run two seeds, or give --spread.")
    else:
        spread_text = _difference(known.deviation, spec.metric)
        terminal.say(f"Detected with probability 0.8, given a spread of {spread_text} over seeds ({known.source}).")
    if not given:
        return
    if best is None:
        terminal.say("Not even 2 seeds fit.")
        raise typer.Exit(1)
    change = "" if best.steps is None or best.factor == 1 else f" --set steps={best.steps}"
    seeds = ",".join(map(str, range(best.seeds)))
    again = "".join(f" --set {shlex.quote(one)}" for one in sets or ())
    terminal.say(
        f"Run it: cohort study run {shlex.quote(study)}{again}{change} --seeds {seeds} --workers {measured.workers}"
    )


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
