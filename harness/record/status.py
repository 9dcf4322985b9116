"""The progress of each trial of a study."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..data import ENDED, TrialState


@dataclass(frozen=True)
class TrialStatus:
    """The progress of one (arm, seed): accuracy as a fraction, seconds of training, `done` of `total` in `phase`, the
    last training `step` of `steps`, the seconds `left` (NaN if unknown)."""

    arm: str
    seed: int
    state: Literal["waiting"] | TrialState
    reason: str | None
    phase: str
    done: int
    total: int
    accuracy: float | None
    tokens_per_second: float | None
    seconds: float | None
    directory: Path
    generated_tokens: float | None = None  # known once it has ended
    on_gpu: bool = False
    held: bool = False  # its arm was asked to stop
    step: int = 0
    steps: int = 0
    left: float = math.nan

    @property
    def is_open(self) -> bool:
        """Whether the trial may still change."""
        return self.state == "running" or (self.state not in ENDED and not self.held)


@dataclass(frozen=True)
class StudyStatus:
    """The progress of a study; its trials are in the order in which they run.

    `to_come` is the number of trials, at most, that a search has not handed out yet; `left` has the seconds until the
    report with so many `workers` (NaN if unknown), which come from `measured` trials (0: from arithmetic).
    """

    name: str
    question: str
    trials: tuple[TrialStatus, ...]
    to_come: int = 0
    metric: str = "validation/accuracy"
    left: float = math.nan
    workers: int = 0
    measured: int = 0

    def counts(self) -> dict[str, int]:
        """Number of trials in each state that occurs."""
        return dict(Counter(trial.state for trial in self.trials))

    @property
    def finished(self) -> bool:
        """Whether nothing is left to run, but failed trials, which a restart repeats, and trials of stopped arms."""
        return not self.to_come and not any(trial.is_open for trial in self.trials)

    @property
    def all_valid(self) -> bool:
        return all(trial.state in ("complete", "pruned") or trial.held for trial in self.trials)
