"""`cohort publish`."""

from pathlib import Path
from typing import Annotated

import typer

from ...cli.commands import command
from ...console import terminal


@command("publish", "cohort publish runs/train/my-run me/gsm8k-grpo")
def publish(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="RUNS/train/NAME or RUNS/studies/NAME/trials/TRIAL.")],
    name: Annotated[str, typer.Argument(metavar="USER/NAME", help="A repository on the Hugging Face Hub.")],
) -> None:
    """Put the final policy of a run on the Hugging Face Hub, with a model card.

    The card is written from the record (task, tests with intervals, seeds, command); a repository that is new is
    private. A trial of a study keeps its policy with checkpoints.finished=weights, a single run by default.
    """
    from .hub import publish as uploaded

    terminal.say(f"{name}: {uploaded(run, name)}")
