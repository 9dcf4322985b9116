"""1 for a completion whose final answer equals the gold answer under the task's own equality, else 0.

With `partial`, a completion earns the score of the task's verifier, from 0 to 1. Everywhere else, correct still means a
score of exactly 1.
"""

from pydantic import Field

from ..data import GradedGroup
from ..interfaces import Reward


class Accuracy(Reward):
    """1 for a correct final answer, else 0, or partial credit."""

    sees_gold = True

    partial: bool = Field(default=False, description="pay the score of the verifier, 0 to 1 (with partial credit)")

    @property
    def needs_partial_credit(self) -> bool:
        return self.partial

    def score(self, group: GradedGroup) -> list[float]:
        if self.partial:
            assert group.scores is not None
            return list(group.scores)
        assert group.correct is not None
        return [1.0 if correct else 0.0 for correct in group.correct]
