"""Decides when the labels or the policy of a run collapsed.

A series collapses at the first step from which it stays below half of its best earlier value to the end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..harness.record.study import TrialRecord
from .analysis import Analysis
from .statistics import Interval, t_interval

# Name -> (metric, number of points averaged). Labels are the majority answers of the groups, for any reward; they are
# averaged because a step has few groups.
_SERIES = {"labels": ("train/majority_accuracy", 10), "policy": ("validation/accuracy", 1)}


@dataclass(frozen=True)
class Collapse:
    """The steps at which `what` collapsed in seeds of an arm, of `num_seeds`; `interval` is Student's over these steps,
    None for a single one."""

    arm: str
    what: str
    steps: tuple[int, ...]
    num_seeds: int
    interval: Interval | None


def collapses(analysis: Analysis) -> list[Collapse]:
    """The collapses of each arm, in the study's order; includes invalid runs, because a collapse may end a run."""
    found = []
    for arm in analysis.arms:
        ended = [t for t in analysis.record.trials if t.arm == arm.label and t.state in ("complete", "invalid")]
        for what, (metric, window) in _SERIES.items():
            measured = [trial for trial in ended if trial.history.get(metric)]
            each = [collapse_step(trial.history[metric], window) for trial in measured]
            if steps := tuple(step for step in each if step is not None):
                interval = _within(t_interval(steps), measured, metric)
                found.append(Collapse(arm.label, what, steps, len(measured), interval))
    return found


def collapse_step(series: Sequence[tuple[int, float]], window: int = 1) -> int | None:
    """The step at which a series of (step, value) collapsed; None if it did not.

    A value is the mean of the last `window` finite ones, from the first full window on.
    """
    known = [(step, value) for step, value in series if math.isfinite(value)]
    best, since = -math.inf, None
    for place in range(window, len(known) + 1):
        step, value = known[place - 1][0], sum(v for _, v in known[place - window : place]) / window
        if value < best / 2:
            since = step if since is None else since
        else:
            since = None
        best = max(best, value)
    return since


def _within(interval: Interval | None, trials: Sequence[TrialRecord], metric: str) -> Interval | None:
    """The same interval without steps that no run took."""
    last = max(trial.history[metric][-1][0] for trial in trials)
    return interval and replace(interval, low=max(interval.low, 0.0), high=min(interval.high, float(last)))
