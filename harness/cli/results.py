"""`cohort doctor`: what this machine can do, and what a run needs of it; `report` and `ui`."""

from collections.abc import Mapping
from typing import Annotated

import typer

from .. import api
from ..console import terminal
from .commands import command
from .options import RUNS, Json, Mirror, Runs, Sets


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
    sets: Sets = None,
    runs: Runs = RUNS,
    as_json: Json = False,
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


@command("report", "cohort report quickstart --open", "cohort report group_size kl_beta")
def report(
    studies: Annotated[list[str], typer.Argument(metavar="STUDY...", help="Names of studies in the runs folder.")],
    browser: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    runs: Runs = RUNS,
    mirror: Mirror = None,
) -> None:
    """Write a study's report again from its files; several studies of one task give one report.

    A report of several studies goes to RUNS/reports, with arms named `study: arm`. Trials that ran on
    other hosts come from the MLflow server that --mirror names.
    """
    files = api.report(*studies, runs=runs)
    terminal.say(files.answer)
    terminal.say(f"Report: {files.html}")
    if browser:
        typer.launch(files.html.resolve().as_uri())


@command("ui", "cohort ui", "cohort ui --port 5001 --open")
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1.")] = 5000,
    browser: Annotated[bool, typer.Option("--open", help="Open the newest study's page in a browser.")] = False,
    runs: Runs = RUNS,
    mirror: Mirror = None,
) -> None:
    """Serve the MLflow pages of the runs folder on 127.0.0.1 until Ctrl-C, with all that its records have.

    With --mirror mlflow=http://HOST:PORT, print the addresses of its pages instead.
    """

    def show(pages: Mapping[str, str]) -> None:
        for name, page in pages.items():
            terminal.say(f"{name}: {page}")
        if browser:
            page = [*pages.values()][-1]
            if "?token=" in page:  # all users of a machine see what a browser is told, but not this file
                (link := runs.resolve() / "open.html").unlink(missing_ok=True)
                link.touch(0o600, exist_ok=False)
                link.write_text(f'<!DOCTYPE html><meta http-equiv="refresh" content="0; url={page}">')
                page = link.as_uri()
            typer.launch(page)

    if (ending := api.browse(runs, port, show)) is not None:
        terminal.fail(ending)
        raise typer.Exit(1)
