"""Rewards each answer of a group for the group's low answer entropy, without the gold answer.

EMPO, Zhang et al. 2025 (arXiv:2504.05812) lowers the entropy H of the classes of equal answers: a completion earns the
share p of its class, where the group's H lies between two bounds. Departure: it earns ln p, whose mean over the group
is -H and whose policy gradient is the gradient of -H, while p's belongs to the sum of p^2; the share itself is
`majority_vote` with `soft`. Classes follow the task's own equality; each completion without an answer is a
separate class.
"""

from collections.abc import Mapping, Sequence
from math import inf, log

from pydantic import Field

from ....data import GradedGroup
from ....interfaces import Reward
from ....rewards.majority_vote import votes


class AnswerEntropy(Reward):
    """ln(share of the group that gives the same answer), whose mean is minus the entropy of the answers (EMPO)."""

    min_entropy: float = Field(default=0.0, ge=0, description="a group of answers of lower entropy (nats) earns 0")
    max_entropy: float | None = Field(default=None, gt=0, description="a group of higher answer entropy earns 0")

    def score(self, group: GradedGroup) -> list[float]:
        counts = votes(group.classes)
        surprise = [-log((1 if c is None else counts[c]) / len(group.classes)) for c in group.classes]
        entropy = sum(surprise) / len(surprise)
        most = inf if self.max_entropy is None else self.max_entropy
        within = self.min_entropy - 1e-9 <= entropy <= most + 1e-9  # the entropy of 7 answers is above ln 7 by rounding
        return [-value if within else 0.0 for value in surprise]

    def metrics(self, group: GradedGroup, scores: Sequence[float]) -> Mapping[str, float]:
        """The entropy of the group's answers in nats, from 0 to ln G."""
        return {"vote/entropy": -sum(AnswerEntropy().score(group)) / len(group.classes)}
