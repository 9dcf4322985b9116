"""Computes the results of a study: each arm's estimate, the comparisons, the gaps, the grid.

Trials that do not count are listed with their reason. Arms are compared with the baseline over the seeds that both
completed and the same test problems, because equal seeds share prompts, noise and initial weights (common random
numbers). The p-values that an answer may state form one Holm family: the comparisons with the baseline and the effects
of the grid. The arms of a search have no baseline and form no grid, because comparing the best of many with an
arbitrary arm is not a valid test. Control arms are kept out of all this: each is compared separately with the arms that
share its task and its start.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.random import Generator

from ..harness.data import FINAL
from ..harness.record.study import StudyRecord
from . import statistics
from .anova import Grid, grid_of
from .statistics import ALPHA, CrossedVariance, Floats, Interval
from .trials import (
    ArmSummary,
    Outcome,
    Trials,
    arm_specs,
    awaits_seeds,
    bounded,
    choose_outcome,
    num_problems,
    score,
    search_of,
    share_of_alpha,
    stated,
    summarise,
    usable_trials,
    wanted_pairs,
    with_arms,
)

BOOTSTRAP_SEED = 0
PLANNED_DIFFERENCES = (0.01, 0.02, 0.05, 0.10)
_START = ("model", "task", "prompt", "cold_start")  # settings that a control shares with its arms
ACCURACIES = re.compile(r"test/(?:(?:greedy_)?accuracy|(?:pass|maj)_at_\d+)")


@dataclass(frozen=True)
class Comparison:
    """An arm minus the baseline over the seeds that both completed; intervals are None with fewer than 2.

    differences  seed -> difference of the outcome
    cells        the same by problem, seeds by problems, or None
    family       number of p-values that Holm's correction spans
    share        the part of ALPHA that it may spend
    """

    summary: ArmSummary = field(compare=False)
    baseline: ArmSummary = field(compare=False)
    differences: Mapping[int, float]
    cells: Floats | None = field(compare=False)
    interval: Interval | None
    p: float
    p_adjusted: float
    family: int
    outcome: Outcome
    rng_seed: int
    share: float = 1.0
    is_alone: bool = True  # all comparisons have this baseline, so that the arm names it

    @property
    def arm(self) -> str:
        return self.summary.label

    @property
    def name(self) -> str:
        return self.arm if self.is_alone else f"{self.arm} - {self.baseline.label}"

    @property
    def values(self) -> list[float]:
        return list(self.differences.values())

    @property
    def estimate(self) -> float:
        return float(np.mean(self.values))

    @property
    def bootstrap(self) -> Interval | None:
        return statistics.bootstrap_interval(self.values, self.rng_seed)

    @property
    def is_detected(self) -> bool:
        return self.p_adjusted < ALPHA

    @property
    def student(self) -> Interval | None:
        return bounded(self.over_seeds, self.outcome, least=-1.0)

    @property
    def over_seeds(self) -> Interval | None:
        """Student's interval, which may leave the range of the outcome."""
        return statistics.t_interval(self.values, self.share)

    @cached_property
    def improvement(self) -> Interval:
        """The probability that a run of the arm is above one of the baseline, over all seeds of both."""
        arm, baseline = self.summary.values, self.baseline.values
        improved = statistics.probability_of_improvement(arm, baseline)
        return statistics.improvement_interval(improved, len(arm), len(baseline))

    @cached_property
    def detectable(self) -> float:
        """The true difference that this design finds with probability 0.8 after Holm's first step."""
        if self.interval is None or not self.interval.error > 0:
            return math.nan
        level = ALPHA * self.share / self.family
        return statistics.minimum_detectable_difference(self.interval.error, self.interval.df, level)

    @cached_property
    def seeds_for(self) -> dict[float, int | None]:
        """Seeds per arm that find each planned difference (fractions) with that probability; None for more than 200.

        Empty without a known variance.
        """
        if math.isnan(self.detectable) or not self.outcome.is_fraction:
            return {}
        variance, problems = CrossedVariance(float(np.var(self.values, ddof=1)), 0.0, 0.0), 1
        if self.cells is not None:
            variance, problems = statistics.crossed_variance(self.cells), self.cells.shape[1]
        level, share = ALPHA / self.family, statistics.any_time_share if self.share < 1 else lambda _: 1.0
        return {size: statistics.seeds_needed(size, variance, problems, level, share) for size in PLANNED_DIFFERENCES}


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of arms over the seeds that all of them completed.

    interval    the one stated in reports
    tests       the intervals behind its p; empty without a test, as while planned seeds are to come
    resolution  of the scores, as in `t_test`
    variance    of one seed, and of one problem of `num_problems`; None with fewer than 2 seeds
    """

    differences: Mapping[int, float]
    interval: Interval | None
    tests: Sequence[Interval] = ()
    resolution: float = 0.0
    variance: CrossedVariance | None = None
    num_problems: int = 1

    @property
    def p(self) -> float:
        """Of no difference: the largest of its tests'; NaN without."""
        return _p_value(self.tests, self.resolution)

    @property
    def estimate(self) -> float:
        return float(np.mean(list(self.differences.values())))


@dataclass(frozen=True)
class Gap:
    """An (arm, seed) without a usable result, and why; `state` is its trial's or says what is missing."""

    arm: str
    seed: int
    state: str
    reason: str


@dataclass(frozen=True)
class ControlArm:
    """A control arm: what it changes, its result, and the arms that share its task and its start, each minus it."""

    control: str
    summary: ArmSummary
    comparisons: Sequence[Comparison]
    gaps: Sequence[Gap]


@dataclass(frozen=True)
class Analysis:
    """All numbers of a report. `comparisons` holds every arm that can be compared with the baseline, `usable` the
    complete trials with a finite outcome.

    Only `controls` includes control arms; even `record` leaves them out.
    """

    record: StudyRecord
    outcome: Outcome
    usable: Trials
    arms: Sequence[ArmSummary]
    comparisons: Sequence[Comparison]
    gaps: Sequence[Gap]
    grid: Grid | None
    controls: Sequence[ControlArm] = ()

    @property
    def baseline(self) -> ArmSummary | None:
        return next((arm for arm in self.arms if arm.is_baseline), None)

    @property
    def finished_arms(self) -> list[ArmSummary]:
        return [arm for arm in self.arms if arm.scores]

    @property
    def num_complete(self) -> int:
        return sum(len(arm.scores) for arm in self.arms)

    def arm(self, label: str) -> ArmSummary:
        return next(arm for arm in self.arms if arm.label == label)

    def comparison(self, label: str) -> Comparison | None:
        return next((comparison for comparison in self.comparisons if comparison.arm == label), None)


def analysed(record: StudyRecord) -> Analysis:
    """The study's numbers, the bootstrap's drawn with the seed that the page states."""
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    everything, outcome, specs = record, choose_outcome(record), arm_specs(record.trials)
    controls = {arm: spec["control"] for arm, spec in specs.items() if spec.get("control")}
    labels = [arm for arm in dict.fromkeys([*record.arms, *(t.arm for t in record.trials)]) if arm not in controls]
    record = with_arms(record, labels)
    usable = usable_trials(record, outcome)
    arms = [summarise(label, record, outcome, usable, rng) for label in labels]
    grid = grid_of(arms, record) if search_of(record) is None else None
    by_label, references = {arm.label: arm for arm in arms}, record.references
    if not references and search_of(record) is None:
        references = dict.fromkeys(by_label, record.baseline)
    pairs = [(arm, by_label[to]) for arm in arms if (to := references.get(arm.label, arm.label)) in by_label]
    effects, same = grid.effects if grid is not None else (), same_as_baseline(record)
    comparisons = [
        replace(one, is_alone=not record.references, p=math.nan if one.arm in same else one.p)
        for one in _compare(pairs, record, outcome, rng)
    ]
    # one that waits for seeds has no p yet, and yet its place in the family
    p_values = [1.0 if math.isnan(one.p) and one.share < 1 and one.arm not in same else one.p for one in comparisons]
    p_values += [one.p for one in effects]
    adjusted = statistics.holm(p_values)
    family = max(len([p for p in p_values if not math.isnan(p)]), 1)
    comparisons = [
        replace(one, p_adjusted=math.nan if math.isnan(one.p) else p, family=family)
        for one, p in zip(comparisons, adjusted, strict=False)
    ]
    if grid is not None:
        after = adjusted[len(comparisons) :]
        grid = replace(grid, effects=[replace(one, p_adjusted=p) for one, p in zip(effects, after, strict=True)])
    found = []
    for label, control in controls.items():
        alone = with_arms(everything, [label])
        mine = usable_trials(alone, outcome)
        summary = summarise(label, alone, outcome, mine, rng)
        start = [specs[label].get(key) for key in _START]
        alike = [arm for arm in arms if arm.label in specs and [specs[arm.label].get(key) for key in _START] == start]
        compared = _compare([(arm, summary) for arm in alike], everything, outcome, rng)
        found.append(ControlArm(control, summary, compared, _gaps(alone, mine)))
    return Analysis(record, outcome, usable, arms, comparisons, _gaps(record, usable), grid, found)


def same_as_baseline(record: StudyRecord) -> list[str]:
    """The arms that cannot differ from what they are compared with by construction: no hypothesis, so no p."""
    references = record.references or dict.fromkeys(record.arms, record.baseline)
    pairs = [(label, references.get(label, label), labels) for labels, _ in record.identical for label in labels]
    return [label for label, reference, labels in pairs if reference != label and reference in labels]


def contrast(record: StudyRecord, values: Mapping[str, Mapping[int, float]], weights: Mapping[str, float]) -> Contrast:
    """The weighted sum of arms for each seed, with t interval and test; `values` maps arm -> seed -> value."""
    seeds = sorted(seed for seed in values[next(iter(weights))] if all(seed in values[arm] for arm in weights))
    sums = {seed: sum(weight * values[arm][seed] for arm, weight in weights.items()) for seed in seeds}
    interval = statistics.t_interval(list(sums.values()), share_of_alpha(record, seeds))
    if interval is None or awaits_seeds(record, seeds):
        return Contrast(sums, interval)
    spread = CrossedVariance(float(np.var(list(sums.values()), ddof=1)), 0.0, 0.0)
    return Contrast(sums, interval, [interval], variance=spread)


def outcome_contrast(analysis: Analysis, weights: Mapping[str, float]) -> Contrast:
    """The same for the study's outcome, over seeds and problems if the scores of single problems are known."""
    found = contrast(analysis.record, {arm.label: arm.scores for arm in analysis.arms}, weights)
    ends = sum(min(weight, 0.0) for weight in weights.values()), sum(max(weight, 0.0) for weight in weights.values())
    counted = analysis.arm(next(iter(weights))).num_problems
    found = replace(found, resolution=1 / counted if counted else 0.0)
    cells = [(weight, analysis.arm(arm).cells_of(found.differences)) for arm, weight in weights.items()]
    weighted = [weight * rows for weight, rows in cells if rows is not None]
    if found.interval is None or len(weighted) < len(weights):
        return replace(found, interval=bounded(found.interval, analysis.outcome, *ends))
    summed = np.sum(weighted, axis=0)
    share = found.interval.share
    interval = bounded(statistics.cautious_interval(summed, share), analysis.outcome, *ends)
    if not found.tests:
        return replace(found, interval=interval)
    tests = [*found.tests, *statistics.cautious_intervals(summed, share)[1:]]
    spread = statistics.crossed_variance(summed)
    return replace(found, interval=interval, tests=tests, variance=spread, num_problems=summed.shape[1])


def marginal(analysis: Analysis, levels: Mapping[str, Any]) -> Contrast | None:
    """The mean outcome of the grid's arms at these levels over the seeds that all of them completed.

    A single arm has its own interval. None if the arms share no seed.
    """
    arms = [arm for arm in analysis.arms if arm.factors and levels.items() <= arm.factors.items()]
    if not arms or not set.intersection(*(set(arm.scores) for arm in arms)):
        return None
    if len(arms) == 1:
        return Contrast(arms[0].scores, arms[0].interval)
    return outcome_contrast(analysis, {arm.label: 1 / len(arms) for arm in arms})


def held_out_accuracies(analysis: Analysis) -> dict[str, dict[str, tuple[float, Interval | None]]]:
    """Metric -> arm -> (mean, interval) of every logged accuracy on the test split.

    The outcome has the arm's stated interval, the others have Student's over seeds. An arm stands under a metric that
    all of its usable trials have.
    """
    usable = analysis.usable
    logged = {name for trial in usable.values() for name in trial.history if ACCURACIES.fullmatch(name)}
    found: dict[str, dict[str, tuple[float, Interval | None]]] = {}
    for name in sorted(logged, key=accuracy_order):
        outcome = Outcome(name, per_problem=False)
        found[name] = {}
        for arm in analysis.finished_arms:
            trials = [usable[arm.label, seed] for seed in arm.scores]
            values = [value for trial in trials if (value := score(trial, name)) is not None]
            if name == analysis.outcome.name:
                found[name][arm.label] = (arm.mean, arm.interval)
            elif len(values) == len(trials):
                interval = statistics.t_interval(values, share_of_alpha(analysis.record, arm.scores))
                interval = bounded(interval, outcome, num_problems=num_problems(trials, outcome))
                found[name][arm.label] = (float(np.mean(values)), interval)
    return found


def accuracy_order(metric: str) -> tuple[bool, bool, bool, int]:
    """Mean accuracy, greedy accuracy, then pass@k and maj@k by k."""
    kind, _, k = metric.partition("_at_")
    return (bool(k), "greedy" in kind, "maj" in kind, int("0" + k))


def _compare(
    pairs: Sequence[tuple[ArmSummary, ArmSummary]], record: StudyRecord, outcome: Outcome, rng: Generator
) -> list[Comparison]:
    """Every arm with another that it shares a seed with, each in a separate family."""
    found = []
    for arm, baseline in pairs:
        resolution = 1 / baseline.num_problems if baseline.num_problems else 0.0
        differences = {seed: arm.scores[seed] - baseline.scores[seed] for seed in arm.scores if seed in baseline.scores}
        if arm is baseline or not differences:
            continue
        cells, baseline_cells = arm.cells_of(differences), baseline.cells_of(differences)
        cells = None if cells is None or baseline_cells is None else cells - baseline_cells
        share = share_of_alpha(record, differences)
        interval = stated(list(differences.values()), cells, share)
        has_spread = any(value not in (0.0, 1.0) for one in (arm, baseline) for value in one.scores.values())
        if interval and arm.interval and baseline.interval and interval.error == 0 and not has_spread:
            low, high = arm.interval.low - baseline.interval.high, arm.interval.high - baseline.interval.low
            interval = replace(interval, low=low, high=high)  # all right or all wrong: as uncertain as both arms
        interval = bounded(interval, outcome, least=-1.0)
        waits = awaits_seeds(record, differences)
        tests = [statistics.t_interval(list(differences.values()), share)]
        if cells is not None:
            tests += statistics.cautious_intervals(cells, share)[1:]
        p = math.nan if waits else _p_value([test for test in tests if test is not None], resolution)
        rng_seed = int(rng.integers(2**32))
        found.append(Comparison(arm, baseline, differences, cells, interval, p, p, 1, outcome, rng_seed, share))
    return found


def _p_value(tests: Sequence[Interval], resolution: float) -> float:
    """The largest of the p-values behind a cautious interval: it is below 0.05 only if that interval excludes 0.

    NaN if one of them is: a difference without spread whose scores were not counted.
    """
    return float(np.max([statistics.t_test(test, resolution) for test in tests])) if tests else math.nan


def _gaps(record: StudyRecord, usable: Trials) -> list[Gap]:
    by_pair = {(trial.arm, trial.seed): trial for trial in record.trials}
    searched = {arm["label"]: arm["state"] for arm in (record.search or {}).get("arms", ())}
    gaps = []
    for arm, seed in dict.fromkeys([*wanted_pairs(record), *by_pair]):
        trial = by_pair.get((arm, seed))
        state, reason = (trial.state, trial.reason) if trial is not None else (None, None)
        if (arm, seed) in usable:
            continue
        if arm in record.stopped and state not in FINAL:
            state, reason = "stopped", "the arm was stopped on request"
        elif searched.get(arm) == "pruned":
            state, reason = "pruned", reason or "the search gave this arm up early"
        elif state is None:
            state, reason = "not started", "no trial yet"
        elif state == "complete":
            state, reason = "no value", reason or "complete, but without a finite outcome"
        gaps.append(Gap(arm, seed, state, reason or "no reason recorded"))
    return gaps
