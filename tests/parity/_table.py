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


@dataclass
class Difference:
    """The largest differences seen so far.

    `relative` is over the largest number of the batch, where that is not itself rounding; the verdict goes by `scaled`,
    which is over max(1, |theirs|).
    """

    absolute: float = 0.0
    relative: float = 0.0
    scaled: float = 0.0

    def see(self, one: Tensor, other: Tensor) -> None:
        assert one.shape == other.shape, (one.shape, other.shape)
        gap, size = (one.double() - other.double()).abs(), other.double().abs()
        assert torch.isfinite(gap).all(), "a number is not finite"
        self.absolute = max(self.absolute, gap.max().item())
        if size.max() > 1e-9:
            self.relative = max(self.relative, (gap.max() / size.max()).item())
        self.scaled = max(self.scaled, (gap / size.clamp(min=1)).max().item())


@dataclass(frozen=True)
class Result:
    row: Row
    num_cases: int
    value: Difference
    gradient: Difference | None
    unexplained: float

    @property
    def verdict(self) -> str:
        worst = max(d.scaled for d in (self.value, self.gradient) if d is not None)
        if self.row.predicted is None:
            return "equal" if worst <= TOLERANCE else "DIFFERENT"
        if worst <= TOLERANCE:
            return "NOT NEEDED"
        return "explained" if self.unexplained <= TOLERANCE else "DIFFERENT"

    @property
    def holds(self) -> bool:
        return self.verdict in ("equal", "explained")


def evaluate(row: Row) -> Result:
    value, rest = Difference(), Difference()
    gradient: Difference | None = None
    count = 0
    for case in row.cases():
        ours, theirs = row.ours(case), row.theirs(case)
        value.see(ours.value, theirs.value)
        if theirs.gradient is not None:
            assert ours.gradient is not None
            gradient = gradient or Difference()
            gradient.see(ours.gradient, theirs.gradient)
        if row.predicted is not None:
            expected = row.predicted(case)
            rest.see(expected.value, theirs.value)
            if theirs.gradient is not None:
                assert expected.gradient is not None
                rest.see(expected.gradient, theirs.gradient)
        count += 1
    assert count, "a row needs cases"
    return Result(row, count, value, gradient, rest.scaled)


def markdown(results: Iterable[Result]) -> str:
    """The table, a line for each row."""
    lines = [
        "| objective | function of the library | batches | value: abs | rel | gradient: abs | rel | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        slope = "- | -" if r.gradient is None else f"{r.gradient.absolute:.1e} | {r.gradient.relative:.1e}"
        told = r.verdict
        if r.row.reason:
            told += f" (left: {r.unexplained:.1e}): {r.row.reason}"
        numbers = f"{r.value.absolute:.1e} | {r.value.relative:.1e} | {slope}"
        lines.append(f"| {r.row.objective} | {r.row.function} | {r.num_cases} | {numbers} | {told} |")
    return "\n".join(lines) + "\n"
