"""`cohort` in the processes of a trial; the one of rank `argv[1]` raises in its first update. For `rank-raises`."""

import sys
from typing import Any

import torch

from ...cli.app import main
from ...devices import ranks
from ...run.learner import Learner

WORDS = "a planted error of one process"
learned = Learner.update
RAISES = int(sys.argv.pop(1)) if __name__ == "__main__" else -1


def update(learner: Learner, *given: Any) -> Any:
    if ranks.rank() == RAISES:
        raise torch.OutOfMemoryError(WORDS)
    return learned(learner, *given)


if __name__ == "__main__":
    Learner.update = update  # pyright: ignore[reportAttributeAccessIssue]
    main()
