"""1 for a completion whose final answer equals the gold answer under the task's own equality, else 0."""

from typing import ClassVar

from harness.interfaces import Reward
from harness.types import GradedGroup


class Accuracy(Reward):
    """1 for a correct final answer, else 0."""

    sees_gold: ClassVar[bool] = True

    def score(self, group: GradedGroup) -> list[float]:
        assert group.correct is not None
        return [1.0 if correct else 0.0 for correct in group.correct]
