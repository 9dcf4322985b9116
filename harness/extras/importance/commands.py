"""`cohort importance`."""

from typing import Annotated

import typer

from ...cli.commands import command
from ...cli.options import RUNS, Runs
from ...console import terminal


@command("importance", "cohort importance group_size kl_beta")
def importance(studies: Annotated[list[str], typer.Argument(metavar="STUDY...")], runs: Runs = RUNS) -> None:
    """Write a page that shows which setting mattered: parallel coordinates and importances over all complete runs."""
    from .page import importance as written

    terminal.say(str(written(*studies, runs=runs)))
