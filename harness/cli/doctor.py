"""`cohort doctor`: what this machine can do, and what a run needs of it."""

from typing import Annotated

import typer

from .. import api
from ..console import terminal
from . import options
from .commands import command


@command(
    "doctor",
    "cohort doctor",
    "cohort doctor --json",
    "cohort doctor --run my_run.yaml --set model=Qwen/Qwen2.5-0.5B --set optimizer.tokens_per_microbatch=4096",
)
def doctor(
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="SPEC.yaml", help="Estimate memory and disk of a run or of a study's arms."),
    ] = None,
    sets: options.Sets = None,
    runs: options.Runs = options.RUNS,
    as_json: options.Json = False,
) -> None:
    """Check versions, device, cores, disk and the runs folder; exit code 1 if there is a problem.

    With --run, instead estimate memory and disk of that run, or of one trial of each arm of that study; exit code 2 if
    one cannot fit. `cohort study run --dry-run` estimates the disk of a whole study.
    """
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
