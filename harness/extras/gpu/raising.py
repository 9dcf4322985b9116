"""`cohort`, in processes of a trial of which the second one raises in its first update: for the claim `rank-raises`."""

from typing import Any

import torch

from ...cli.app import main
from ...devices import ranks
from ...run.learner import Learner

WORDS = "a planted error of the second process"
learned = Learner.update


def update(learner: Learner, *given: Any) -> Any:
    if ranks.rank() == 1:
        raise torch.OutOfMemoryError(WORDS)
    return learned(learner, *given)


if __name__ == "__main__":
    Learner.update = update  # pyright: ignore[reportAttributeAccessIssue]
    main()
