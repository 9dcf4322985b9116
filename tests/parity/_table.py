"""When two sides count as equal, and the table that says so.

A row compares one of our numbers with one function of a library over many random batches. It is `equal` where nothing
differs by more than TOLERANCE; `explained` where something does, and the row's own rule predicts the library's number
from the batch within TOLERANCE. A rule that nothing needs is an error like a difference that nothing explains: both say
that this list is no longer true.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from _cases import Case, Numbers
from torch import Tensor

TOLERANCE = 1e-6  # of max(1, |theirs|)


@dataclass(frozen=True)
class Row:
    """One comparison: `theirs(case)` against `ours(case)`, or, with a reason, against `predicted(case)` as well."""

    objective: str
    function: str
    cases: Callable[[], Iterable[Case]]
    ours: Callable[[Case], Numbers]
    theirs: Callable[[Case], Numbers]
    reason: str = ""
    predicted: Callable[[Case], Numbers] | None = None


@dataclass(frozen=True)
class Result:
    """The largest differences over all batches, each over max(1, |theirs|)."""

    row: Row
    num_cases: int
    value: float
    gradient: float | None
    unexplained: float

    @property
    def verdict(self) -> str:
        worst = max(self.value, self.gradient or 0.0)
        if self.row.predicted is None:
            return "equal" if worst <= TOLERANCE else "DIFFERENT"
        if worst <= TOLERANCE:
            return "NOT NEEDED"
        return "explained" if self.unexplained <= TOLERANCE else "DIFFERENT"

    @property
    def holds(self) -> bool:
        return self.verdict in ("equal", "explained")


def apart(one: Tensor | None, other: Tensor) -> float:
    assert one is not None and one.shape == other.shape, other.shape
    gap = (one.double() - other.double()).abs()
    assert torch.isfinite(gap).all(), "a number is not finite"
    return (gap / other.double().abs().clamp(min=1)).max().item()


def evaluate(row: Row) -> Result:
    values, gradients, rest = [], [], [0.0]
    for case in row.cases():
        ours, theirs = row.ours(case), row.theirs(case)
        expected = ours if row.predicted is None else row.predicted(case)
        values.append(apart(ours.value, theirs.value))
        rest.append(apart(expected.value, theirs.value))
        if theirs.gradient is not None:
            gradients.append(apart(ours.gradient, theirs.gradient))
            rest.append(apart(expected.gradient, theirs.gradient))
    assert values, "a row needs cases"
    return Result(row, len(values), max(values), max(gradients, default=None), max(rest))


def markdown(results: Iterable[Result]) -> str:
    """The table, a line for each row."""
    lines = [
        "| objective | function of the library | batches | value | gradient | verdict |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        slope = "-" if r.gradient is None else f"{r.gradient:.1e}"
        told = f"{r.verdict} (left: {r.unexplained:.1e}): {r.row.reason}" if r.row.reason else r.verdict
        lines.append(f"| {r.row.objective} | {r.row.function} | {r.num_cases} | {r.value:.1e} | {slope} | {told} |")
    return "\n".join(lines) + "\n"
