"""`cohort doctor`: finds what would stop or slow a run on this machine, and estimates the memory of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from .. import api
from ..console import terminal
from .commands import app, command
from .options import RUNS, Json, Runs, Sets


@command(
    app,
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
    sets: Sets = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Check versions, device, cores, threads and the runs folder; exit code 1 if there is a problem.

    With --run, instead estimate memory and disk of that run, or of one trial of each arm of that study; exit code 2 if
    one cannot fit. `cohort study run --dry-run` estimates the disk of a whole study.
    """
    if run is not None:
        documents = api.estimate_runs(run, sets or (), runs=runs)
        terminal.print_json(documents) if as_json else _show_estimates(run, documents)
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


def _show_estimates(title: str, documents: Sequence[Mapping[str, Any]]) -> None:
    """Print the memory of runs: bytes by component, and the peak."""
    told = [d for d in documents if d["components"] is not None]
    if not told:
        return
    names = [name for name in told[0]["components"] if any(d["components"][name] for d in told)]
    parts = [[terminal.mebibytes(d["components"][name]) for name in names] for d in told]
    rows = [[d["run"], *part, terminal.mebibytes(d["peak_bytes"])] for d, part in zip(told, parts, strict=True)]
    headers = ["run", *names, "peak"]
    terminal.show_table(f"{title}: estimated memory, MiB", headers, rows, numeric=headers[1:])
    size = terminal.mebibytes(told[0]["device_bytes"])
    terminal.say(f"The device has {size} MiB. Sampling and learning take turns, so the peak is less than the sum.")
    disks = [f"{d['run']} {terminal.mebibytes(d['disk']['running'])}" for d in told if d["disk"]]
    terminal.say(f"Largest disk use of a run's checkpoints, MiB: {', '.join(disks)}.")
