"""`cohort report`."""

from typing import Annotated

import typer

from ..console import terminal
from .commands import app, command, uncollected
from .options import RUNS, Runs, TrackingUri, use_store
from .study import REPORTING


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
    from ..api.report import write_joined_report, write_report
    from ..console.progress import phase_bar
    from ..mirror.address import check_remote

    use_store(tracking_uri)
    check_remote()
    with uncollected(), phase_bar(f"report of {' and '.join(studies)}", REPORTING):
        files = write_report(studies[0], runs)[1] if len(studies) == 1 else write_joined_report(studies, runs)
    terminal.say(files.answer)
    terminal.say(f"Report: {files.html}")
    if browser:
        typer.launch(files.html.resolve().as_uri())
