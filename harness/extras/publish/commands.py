"""`cohort publish`."""

from pathlib import Path
from typing import Annotated

import typer

from ...cli import options
from ...cli.commands import command
from ...console import terminal


@command(
    "publish", "cohort publish runs/train/my-run arithmetic-grpo", "cohort publish runs/train/my-run me/gsm8k-grpo"
)
def publish(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="RUNS/train/NAME or RUNS/studies/NAME/trials/TRIAL.")],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A model of MLflow's registry, or USER/NAME on the Hugging Face Hub.")
    ],
    runs: options.Runs = options.RUNS,
    mirror: options.Mirror = None,
) -> None:
    """Keep the final policy of a run: as a version of a model in MLflow, or on the Hugging Face Hub.

    The version in MLflow links to the run and names its files, which stay where they are; an MLflow server gets a copy.
    The Hub gets the files and a model card from the record (task, tests with intervals, seeds, command); a repository
    that is new is private. A trial of a study keeps its policy with checkpoints.finished=weights, a single run by
    default.
    """
    if "/" in name:
        from .hub import publish as uploaded

        return terminal.say(f"{name}: {uploaded(run, name)}")
    from .registry import register

    version, policy = register(run, name, runs)
    terminal.say(f"{name}, version {version}: {policy}")
