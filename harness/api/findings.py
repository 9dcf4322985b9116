"""Collects the findings of a verification: mismatches by cell, missing evidence, and how many numbers were compared
with what."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

Basis = Literal["completions", "events", "report"]
TOLERANCE = 1e-9  # relative: another machine may round a mean differently


@dataclass(frozen=True)
class Mismatch:
    """A cell that does not match: `place` is a column, metric or line of a file; arm and seed only for a trial's
    cell."""

    arm: str | None
    seed: int | None
    file: str
    place: str
    stored: Any
    derived: Any

    def __str__(self) -> str:
        trial = [] if self.arm is None else [self.arm, f"seed {self.seed}"]
        where = " | ".join([*trial, self.file, *([self.place] if self.place else [])])
        return f"{where}: stored {_shown(self.stored)}, derived {_shown(self.derived)}"


@dataclass
class Findings:
    """`numbers` counts the compared values by their source; `alone` counts values that cannot be recomputed."""

    mismatches: list[Mismatch] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    numbers: Counter[Basis] = field(default_factory=Counter)
    completions: int = 0  # graded again
    files: int = 0  # whose hash was compared
    alone: int = 0

    @property
    def is_verified(self) -> bool:
        return not (self.mismatches or self.lacks)


@dataclass(frozen=True)
class Place:
    """The scope of comparisons: the whole study, or one trial."""

    findings: Findings
    arm: str | None = None
    seed: int | None = None

    def differs(self, file: str, place: str, stored: Any, derived: Any) -> None:
        self.findings.mismatches.append(Mismatch(self.arm, self.seed, file, place, stored, derived))

    def compare(self, basis: Basis, file: str, place: str, stored: Any, derived: Any) -> None:
        self.findings.numbers[basis] += 1
        if not _same(stored, derived):
            self.differs(file, place, stored, derived)

    def compare_hash(self, file: str, stored: str, derived: str) -> None:
        self.findings.files += 1
        if stored != derived:
            self.differs(file, "SHA-256", stored[:16], derived[:16])

    def lacks(self, words: str) -> None:
        trial = "" if self.arm is None else f"{self.arm} | seed {self.seed}: "
        self.findings.lacks.append(trial + words)


def _same(stored: Any, derived: Any) -> bool:
    if isinstance(stored, float | int) and isinstance(derived, float | int):
        both_nan = math.isnan(stored) and math.isnan(derived)
        return both_nan or math.isclose(stored, derived, rel_tol=TOLERANCE, abs_tol=1e-12)
    return stored == derived


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{value!r:.120}" if isinstance(value, str) else str(value)[:120]
