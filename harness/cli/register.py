"""`cohort register`."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import terminal
from . import options
from .commands import app, command


@command(app, "register", "cohort register runs/train/my-run --name arithmetic-grpo")
def register(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="RUNS/train/NAME or RUNS/studies/NAME/trials/TRIAL.")],
    name: Annotated[str, typer.Option(metavar="NAME", help="The model's name in MLflow's registry.")],
    runs: options.Runs = options.RUNS,
    tracking_uri: options.TrackingUri = None,
) -> None:
    """Register the final policy of a run as a version of a model in MLflow.

    The version links to the run and names its files, which stay where they are; an MLflow server gets a copy. A trial
    of a study keeps its policy with checkpoints.finished=weights, a single run by default.
    """
    from ..mirror.models import register_policy
    from ..mirror.store import check_runs_folder
    from ..record.finished import model_folder

    options.use_store(tracking_uri)
    name = options.checked_name(name)
    check_runs_folder(runs)
    policy = Path(model_folder(str(run)))
    version = register_policy(runs, run, policy, name)
    terminal.say(f"{name}, version {version}: {policy}")
