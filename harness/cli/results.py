"""`cohort report` and `ui`."""

from collections.abc import Mapping
from typing import Annotated

import typer

from .. import api
from ..console import terminal
from .commands import command
from .options import RUNS, Mirror, Runs


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
