"""Decides which checkpoints stay after a run has its result."""

import logging
import shutil
from pathlib import Path
from typing import Literal

from ..spec.errors import SpecError

Finished = Literal["nothing", "weights"]
CHECKPOINTS = "checkpoints"  # of a run's folder
STATE, LEARNER = "state.json", "learner.pt"  # what a checkpoint has beside its policy
log = logging.getLogger(__name__)


def drop_checkpoints(directory: Path, keep: Finished) -> None:
    """Delete the checkpoints in a run's folder, except the newest policy if the weights are kept.

    Call it when the final result is on disk. A kill in between leaves unused files, which the next call deletes.
    """
    folder = directory / CHECKPOINTS
    if not folder.is_dir():
        return
    newest = max(folder.glob("step-*"), default=None) if keep == "weights" else None
    try:
        for item in folder.iterdir():
            if item != newest:
                shutil.rmtree(item)
        if newest is None:
            folder.rmdir()
        else:
            for name in (STATE, LEARNER):
                (newest / name).unlink(missing_ok=True)
    except OSError as error:  # the result is valid without it
        log.warning("checkpoints that are no longer needed stay in '%s': %s", folder, error)


def model_folder(model: str) -> str:
    """The policy's folder, if `model` is a checkpoint or the folder of a run; else `model`.

    SpecError for a run that has kept no weights.
    """
    for folder in (Path(model), *sorted((Path(model) / CHECKPOINTS).glob("step-*"), reverse=True)):
        if (folder / "policy" / "config.json").is_file():
            return str(folder / "policy")
    if (Path(model) / "run.json").is_file():
        raise SpecError(f"'{model}' kept no weights; a trial of a study keeps them with checkpoints.finished=weights")
    return model
