"""Summarises the trials of an arm: scores, the stated interval, the gain over training, costs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.random import Generator

from ..harness.record.study import StudyRecord, TrialRecord
from . import statistics
from .statistics import Floats, Interval
from .trials import Outcome, Trials, gain, num_first, score, search_of


class Resampled:
    """Values of seeds, and of seeds by problems if known, whose bootstraps are drawn when they are read."""

    cells: Floats | None
    rng_seed: int

    @property
    def values(self) -> list[float]:
        raise NotImplementedError

    @cached_property
    def bootstrap(self) -> Interval | None:
        return statistics.bootstrap_interval(self.values, np.random.default_rng(self.rng_seed))

    @cached_property
    def crossed_bootstrap(self) -> Interval | None:
        rng = np.random.default_rng(self.rng_seed)
        return None if self.cells is None else statistics.crossed_bootstrap_interval(self.cells, rng)


@dataclass(frozen=True)
class ArmSummary(Resampled):
    """One arm over its complete trials.

    scores    seed -> outcome; empty without a complete trial
    cells     fraction right, seeds (in the order of `scores`) by problems, or None
    num_problems  problems behind each score; 0 if they were not counted
    interval  the one that reports state; None with fewer than 2 seeds
    gain      of the study's metric from before the first step to the last, with Student's interval over seeds; `gain_p`
              is that of no gain; None and NaN if they are not known
    costs     mean over seeds of the numbers of `TrialRecord.summary`; peak_memory_bytes is the largest
    """

    label: str
    is_baseline: bool
    factors: Mapping[str, Any]
    scores: Mapping[int, float]
    cells: Floats | None
    num_problems: int
    interval: Interval | None
    student: Interval | None
    gain: Interval | None
    gain_p: float
    rng_seed: int
    costs: Mapping[str, float]

    @property
    def values(self) -> list[float]:
        return list(self.scores.values())

    @property
    def mean(self) -> float:
        return float(np.mean(self.values)) if self.scores else math.nan

    @property
    def interquartile_mean(self) -> float:
        return statistics.interquartile_mean(self.values) if self.scores else math.nan

    def cells_of(self, seeds: Iterable[int]) -> Floats | None:
        """The rows of `cells` that belong to these seeds."""
        order = list(self.scores)
        return None if self.cells is None else self.cells[[order.index(seed) for seed in seeds]]


def summarise(label: str, record: StudyRecord, outcome: Outcome, usable: Trials, rng: Generator) -> ArmSummary:
    mine = sorted((trial for (arm, _), trial in usable.items() if arm == label), key=lambda trial: trial.seed)
    scores = {trial.seed: value for trial in mine if (value := score(trial, outcome.name)) is not None}
    cells = _cells(mine) if outcome.per_problem and mine else None
    values, count, first = list(scores.values()), num_problems(mine, outcome), num_first(record, scores)
    interval = exact_at_ends(bounded(stated(values, cells, first), outcome), count)
    gains = [found for trial in mine if (found := gain(trial, record.metric)) is not None]
    gained = statistics.t_interval(gains, first) if len(gains) == len(mine) else None
    judged = num_problems(mine, Outcome(record.metric, per_problem=False))
    return ArmSummary(
        label=label,
        is_baseline=label == record.baseline and search_of(record) is None,
        factors=next((trial.factors for trial in record.trials if trial.arm == label), {}),
        scores=scores,
        cells=cells,
        num_problems=count,
        interval=interval,
        student=bounded(statistics.t_interval(values, first), outcome),
        gain=bounded(gained, outcome, least=-1.0),
        gain_p=math.nan if gained is None else statistics.t_test(gained, 1 / judged if judged else 0.0),
        rng_seed=int(rng.integers(2**32)),
        costs=_costs(mine),
    )


def _cells(trials: Sequence[TrialRecord]) -> Floats:
    problems = sorted(trials[0].per_problem)
    return np.array([[trial.per_problem[problem] for problem in problems] for trial in trials], dtype=float)


def stated(values: Sequence[float], cells: Floats | None, first: int | None) -> Interval | None:
    """The interval that reports state: over seeds and problems if single problems are known, otherwise over seeds."""
    return statistics.t_interval(values, first) if cells is None else statistics.cautious_interval(cells, first)


def bounded(interval: Interval | None, outcome: Outcome, least: float = 0.0, most: float = 1.0) -> Interval | None:
    """The same interval without values that a fraction cannot have, or a sum of fractions from `least` to `most`."""
    if interval is None or not outcome.is_fraction:
        return interval
    return replace(interval, low=max(interval.low, least), high=min(interval.high, most))


def exact_at_ends(interval: Interval | None, num_problems: int) -> Interval | None:
    """The same interval, or the exact one of a fraction if all seeds are 0 or all are 1 and there is no spread to
    estimate."""
    if interval is None or interval.error > 0 or interval.estimate not in (0.0, 1.0) or not num_problems:
        return interval
    return statistics.exact_interval(interval.estimate, num_problems)


def num_problems(trials: Sequence[TrialRecord], outcome: Outcome) -> int:
    """Problems behind each score; 0 if the outcome is no fraction, or they were not counted."""
    if not trials or not outcome.is_fraction:
        return 0
    counted = trials[0].history.get(f"{outcome.name.partition('/')[0]}/num_prompts")
    return len(trials[0].per_problem) if outcome.per_problem else int(counted[-1][1]) if counted else 0


def _costs(trials: Sequence[TrialRecord]) -> dict[str, float]:
    costs: dict[str, float] = {}
    for key in dict.fromkeys(key for trial in trials for key in trial.summary):
        values = [trial.summary[key] for trial in trials if math.isfinite(trial.summary.get(key, math.nan))]
        if values:
            costs[key] = float(np.max(values) if key == "peak_memory_bytes" else np.mean(values))
    return costs
