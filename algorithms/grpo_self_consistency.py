"""Credit goes to answers that agree with the group's majority; the gold answer is never seen.

GRPO's objective on majority-vote rewards: test-time reinforcement learning, Zuo et al. 2025 (TTRL,
arXiv:2504.16084), after self-consistency decoding, Wang et al. 2022 (arXiv:2203.11171). Departures: votes are counted
over equivalence classes of answers under the task's own equality, not over strings; completions without an answer
neither vote nor win; every class that ties for the most votes wins. Within a group standardisation makes any pair of
reward values equivalent up to the std floor, so 1.0 / -0.1 and 1 / 0 train alike.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar, Literal

from pydantic import Field

from algorithms._group import GroupRelative
from harness.types import GradedGroup


class GRPOSelfConsistency(GroupRelative):
    """GRPO on majority-vote rewards, without gold answers (TTRL)."""

    sees_gold: ClassVar[bool] = False

    name: Literal["grpo_self_consistency"] = "grpo_self_consistency"
    majority_reward: float = Field(default=1.0, description="for an answer of a class with the most votes")
    minority_reward: float = Field(default=-0.1, description="for any other completion")

    def rewards(self, group: GradedGroup) -> list[float]:
        votes = Counter(c for c in group.classes if c is not None)
        most = max(votes.values(), default=0)
        return [
            self.majority_reward if c is not None and votes[c] == most else self.minority_reward for c in group.classes
        ]
