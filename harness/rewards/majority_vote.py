"""Answers that agree with the group's majority are rewarded; the gold answer is never seen.

Self-consistency (Wang et al. 2022, arXiv:2203.11171) as a reward: test-time reinforcement learning (TTRL, Zuo et al.
2025, arXiv:2504.16084, section 2.2). Departures: votes are counted over classes of answers that are equal under the
task's own equality, not over strings; completions without an answer, or with one that only restates the question,
neither vote nor win; every class that ties for the most votes wins, so that the reward does not depend on the order of
the completions.

Three variants, which can be combined. `soft`: an answer earns by the share of votes for it (EMPO's reward, Zhang et al.
2025, arXiv:2504.05812). `min_share`: a vote without a clear majority rewards nobody. `held_out`: each half of the group
is judged by the votes of the other, so that no completion votes for itself; the halves are the first and the second
completions, which are alike but for their noise.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import nan

from pydantic import Field

from ..data import GradedGroup
from ..interfaces import Reward

Classes = Sequence[int | None]
MINORITY = -0.1  # for a completion that does not win


class MajorityVote(Reward):
    """1 for an answer with the most votes, -0.1 for every other completion (TTRL)."""

    soft: bool = Field(default=False, description="pay by the share of the votes, from -0.1 to 1")
    min_share: float = Field(default=0.0, ge=0, le=1, description="least share of the votes that wins")
    held_out: bool = Field(default=False, description="judge each half of the group by the votes of the other half")

    def score(self, group: GradedGroup) -> list[float]:
        scores: list[float] = []
        for judged, voters in self._ballots(group.classes):
            counts, won = votes(voters), winners(voters, self.min_share)
            for c in judged:
                if self.soft:
                    share = counts[c] / len(voters) if c is not None and won else 0.0
                    scores.append(MINORITY + (1.0 - MINORITY) * share)
                else:
                    scores.append(1.0 if c in won else MINORITY)
        return scores

    def metrics(self, group: GradedGroup, scores: Sequence[float]) -> Mapping[str, float]:
        """`vote/label_accuracy` is the share of winning classes that are correct (NaN without votes), `vote/margin` the
        votes of the first class minus votes of the second, over G; `vote/false_positive_rate` is the share of wrong
        completions that are rewarded as right (NaN if none is wrong). With `min_share`, `vote/accepted` is the share of
        votes that reward anybody, and labels are accepted votes'.
        """
        assert group.correct is not None
        right = {c for c, correct in zip(group.classes, group.correct, strict=True) if correct}
        ballots = [(judged, winners(voters, self.min_share)) for judged, voters in self._ballots(group.classes)]
        counts = votes(group.classes)
        first, second = [*sorted(counts.values(), reverse=True), 0, 0][:2]
        labels = [len(won & right) / len(won) for _, won in ballots if won]
        is_rewarded = [c in won for judged, won in ballots for c in judged]
        rewarded = [paid for paid, correct in zip(is_rewarded, group.correct, strict=True) if not correct]
        accepted = {"vote/accepted": len(labels) / len(ballots)} if self.min_share else {}
        return {
            "vote/label_accuracy": sum(labels) / len(labels) if labels else nan,
            "vote/margin": (first - second) / len(group.classes),
            "vote/answered": counts.total() / len(group.classes),
            "vote/false_positive_rate": rewarded.count(True) / len(rewarded) if rewarded else nan,
            **accepted,
        }

    def _ballots(self, classes: Classes) -> list[tuple[Classes, Classes]]:
        """(classes to judge, classes that vote on them) pairs, in the order of the group."""
        if not self.held_out:
            return [(classes, classes)]
        half = len(classes) // 2
        return [(classes[:half], classes[half:]), (classes[half:], classes[:half])]


def votes(classes: Classes) -> Counter[int]:
    """Class -> the number of its answers; no answer is no vote."""
    return Counter(c for c in classes if c is not None)


def winners(voters: Classes, min_share: float = 0.0) -> set[int]:
    """The classes with the most votes, several in a tie; none where that is less than `min_share` of the voters."""
    counts = votes(voters)
    most = max(counts.values(), default=0)
    least = min_share * len(voters) - 1e-9  # 0.28 of 25 is more than 7 by rounding
    return {c for c, count in counts.items() if count == most >= least}
