"""`cohort report`."""

from typing import Annotated

import typer

from .. import api
from ..console import terminal
from .commands import app, command, uncollected
from .options import RUNS, Runs, TrackingUri, use_store


@command(app, "report", "cohort report quickstart --open", "cohort report group_size kl_beta")
def report(
    studies: Annotated[list[str], typer.Argument(metavar="STUDY...", help="Names of studies in the runs folder.")],
    browser: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
) -> None:
    """Write a study's report again from its files; several studies of one task give one report.

    A report of several studies goes to RUNS/reports, with arms named `study: arm`. Trials that ran on
    other hosts come from the MLflow server that --tracking-uri names.
    """
    use_store(tracking_uri)
    with uncollected():
        files = api.report(*studies, runs=runs)
    terminal.say(files.answer)
    terminal.say(f"Report: {files.html}")
    if browser:
        typer.launch(files.html.resolve().as_uri())
