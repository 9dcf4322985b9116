"""`cohort publish`."""

from pathlib import Path
from typing import Annotated

import typer

from ...cli.commands import command
from ...console import terminal


@command("publish", "cohort publish runs/train/my-run me/gsm8k-grpo")
def publish(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="RUNS/train/NAME or RUNS/studies/NAME/trials/TRIAL.")],
    repository: Annotated[str, typer.Argument(metavar="USER/NAME", help="A repository of the Hugging Face Hub.")],
) -> None:
    """Upload the final policy of a run to the Hugging Face Hub.

    It gets a model card from the record (task, tests with intervals, seeds, command); a repository that is new is
    private. A trial of a study keeps its policy with checkpoints.finished=weights, a single run by default.
    """
    from .publish import publish as published

    terminal.say(f"{repository}: {published(run, repository)}")
