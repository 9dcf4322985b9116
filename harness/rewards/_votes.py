"""The vote over a group's answers: each answer votes for its class of equal answers, no answer is no vote."""

from collections import Counter

from harness.types import GradedGroup


def votes(group: GradedGroup) -> Counter[int]:
    """Class -> the number of its answers."""
    return Counter(c for c in group.classes if c is not None)


def winners(group: GradedGroup) -> set[int]:
    """The classes with the most votes; more than one in a tie, none without a vote."""
    counts = votes(group)
    return {c for c, count in counts.items() if count == max(counts.values())}


def share_right(group: GradedGroup) -> float | None:
    """The share of the winning classes that are correct, None without a vote.

    It is the probability that the majority is right, if chance breaks ties.
    """
    assert group.correct is not None
    won = winners(group)
    right = {c for c, correct in zip(group.classes, group.correct, strict=True) if correct}
    return len(won & right) / len(won) if won else None
