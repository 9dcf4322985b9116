"""`cohort study plan` and `doctor`: what a study costs, and what this machine can do."""

import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import api
from ..console import terminal
from . import options
from .commands import command


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
    chosen = api.load_study(study, sets or ())
    limits = {"hours": hours, "flops": flops, "power": power}
    found = api.plan(chosen, **limits, spread=spread, workers=options.num_workers(workers), runs=runs)
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


def _run_book(runs: Path, model: str | None, only: str | None, as_json: bool) -> None:
    def say(one: Any) -> None:
        terminal.say(f"{one.state:8}{one.claim} ({one.seconds:.0f} s)", stderr=True)

    found, is_whole = api.run_book(runs, model, options.words(only), say)
    if as_json:
        terminal.print_json({"claims": found, "is_whole": is_whole})
    else:
        rows = [(one.claim, terminal.state_text(one.state), str(one), f"{one.seconds:.0f}") for one in found]
        terminal.show_table("", ["claim", "state", "found", "seconds"], rows, numeric=["seconds"])
        terminal.say(", ".join(f"{count} {state}" for state, count in Counter(one.state for one in found).items()))
    raise typer.Exit(1 if any(one.state == "FAIL" for one in found) else 0 if is_whole else 130)


@command(
    "doctor",
    "cohort doctor",
    "cohort doctor --json",
    "cohort doctor --gpu",
    "cohort doctor --gpu --model Qwen/Qwen2.5-0.5B --only float32,bfloat16,sleep --json",
    "cohort doctor --run my_run.yaml --set model=Qwen/Qwen2.5-0.5B --set optimizer.tokens_per_microbatch=4096",
)
def doctor(
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="SPEC.yaml", help="Estimate memory and disk of a run or of a study's arms."),
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Measure what is claimed of a GPU: 30 minutes at most.")] = False,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="With --gpu: a Hub id or folder; by default made-up weights.")
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="CLAIMS", help="With --gpu: these claims alone.")] = None,
    sets: options.Sets = None,
    runs: options.Runs = options.RUNS,
    as_json: options.Json = False,
) -> None:
    """Check versions, device, cores, disk and the runs folder; exit code 1 if there is a problem.

    With --run, instead estimate memory and disk of that run, or of one trial of each arm of that study; exit code 2 if
    one cannot fit. `cohort study run --dry-run` estimates the disk of a whole study.

    With --gpu, instead measure what Cohort claims of a GPU and say PASS, FAIL or SKIPPED for each claim; exit code 1 if
    one fails. Paste its table into an issue. It runs without a GPU too, and skips what needs one.
    """
    if (gpu and (run or sets)) or (not gpu and (model or only)):
        raise ValueError("--gpu goes with --model and --only, and without --run and --set")
    if gpu:
        return _run_book(runs, model, only, as_json)
    if run is not None:
        documents = api.estimate_runs(run, sets or (), runs=runs)
        told = [d for d in documents if d["components"] is not None]
        if as_json:
            terminal.print_json(documents)
        elif told:
            names = [name for name in told[0]["components"] if any(d["components"][name] for d in told)]
            sizes = [[*(d["components"][name] for name in names), d["peak_bytes"]] for d in told]
            rows = [[d["run"], *map(terminal.mebibytes, size)] for d, size in zip(told, sizes, strict=True)]
            headers = ["run", *names, "peak"]
            terminal.show_table(f"{run}: estimated memory, MiB", headers, rows, numeric=headers[1:])
            device = f"A run may use {terminal.mebibytes(told[0]['device_bytes'])} MiB of the device."
            again = [d["run"] for d in told if d["recomputes"]]
            terminal.say(f"{device} Recomputed activations: {', '.join(again) or 'none'}.")
            terminal.say("Sampling and learning take turns, so the peak is less than the sum.")
            disks = [f"{d['run']} {terminal.mebibytes(d['disk']['running'])}" for d in told if d["disk"]]
            terminal.say(f"Largest disk use of a run's checkpoints, MiB: {', '.join(disks)}.")
        if bad := next((one for one in documents if one["problem"]), None):
            raise ValueError(f"{bad['run']}: {bad['problem']}")
        return
    if sets:
        raise ValueError("--set changes a run: name its file with --run")
    found = api.check_machine(runs)
    if as_json:
        terminal.print_json(found)
    else:
        rows = [(c.name, terminal.state_text(c.state), c.value, c.advice or "") for c in found]
        terminal.show_table("", ["check", "state", "found", "advice"], rows)
    raise typer.Exit(1 if any(check.state == "problem" for check in found) else 0)
