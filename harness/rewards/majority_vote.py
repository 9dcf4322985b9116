"""Answers that agree with the group's majority are rewarded; the gold answer is never seen.

Self-consistency (Wang et al. 2022, arXiv:2203.11171) as a reward: test-time reinforcement learning (TTRL, Zuo et al.
2025, arXiv:2504.16084, section 2.2). Departures: votes are counted over classes of answers that are equal under the
task's own equality, not over strings; completions without an answer, or with one that only restates the question,
neither vote nor win; every class that ties for the most votes wins, so that the reward does not depend on the order of
the completions.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import nan

from pydantic import Field

from harness.interfaces import Reward
from harness.types import GradedGroup


class MajorityVote(Reward):
    """One value for an answer of a class with the most votes, another for every other completion (TTRL)."""

    majority_reward: float = Field(default=1.0, description="for an answer of a class with the most votes")
    minority_reward: float = Field(default=-0.1, description="for any other completion")

    def score(self, group: GradedGroup) -> list[float]:
        won = winners(group)
        return [self.majority_reward if c in won else self.minority_reward for c in group.classes]

    def metrics(self, group: GradedGroup, scores: Sequence[float]) -> Mapping[str, float]:
        """How right the voted label is, how clear the vote was, and how often it rewards a wrong completion.

        `vote/label_accuracy` is the share of winning classes that are correct (NaN without votes), `vote/margin` the
        votes of the first class minus those of the second, over G; `vote/false_positive_rate` is the share of wrong
        completions that are rewarded as right (NaN if none is wrong).
        """
        assert group.correct is not None
        won = winners(group)
        counts = votes(group)
        first, second = [*sorted(counts.values(), reverse=True), 0, 0][:2]
        rewarded = [c in won for c, correct in zip(group.classes, group.correct, strict=True) if not correct]
        return {
            "vote/label_accuracy": majority_correct(group) if won else nan,
            "vote/margin": (first - second) / len(group.classes),
            "vote/answered": counts.total() / len(group.classes),
            "vote/false_positive_rate": rewarded.count(True) / len(rewarded) if rewarded else nan,
        }


def votes(group: GradedGroup) -> Counter[int]:
    """Class -> the number of its answers; no answer is no vote."""
    return Counter(c for c in group.classes if c is not None)


def winners(group: GradedGroup) -> set[int]:
    """The classes with the most votes; more than one in a tie, none without a vote."""
    counts = votes(group)
    return {c for c, count in counts.items() if count == max(counts.values())}


def majority_correct(group: GradedGroup) -> float:
    """The probability that a majority vote over the group's answers is correct, 0 without a vote.

    It is the share of the winning classes that are correct, as chance breaks ties.
    """
    assert group.correct is not None
    won = winners(group)
    right = {c for c, correct in zip(group.classes, group.correct, strict=True) if correct}
    return len(won & right) / len(won) if won else 0.0
