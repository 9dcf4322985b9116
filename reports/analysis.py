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
from . import statistics, trials
from .anova import Grid, grid_of
from .statistics import ALPHA, CrossedVariance, Floats, Interval
from .trials import ArmSummary, Outcome, Trials

BOOTSTRAP_SEED = 0
PLANNED_DIFFERENCES = (0.01, 0.02, 0.05, 0.10)
_START = ("model", "task", "prompt", "cold_start")  # settings that a control shares with its arms
ACCURACIES = re.compile(r"test/(?:(?:greedy_)?accuracy|(?:pass|maj)_at_\d+)")


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of arms over the seeds that all of them completed; intervals are None with fewer than 2.

    differences  seed -> the sum of the outcome, or of another metric; if arms share no seeds, of the last arm's seed
                 and the means of the others
    interval     the one stated in reports
    student      Student's (or Welch's) over seeds alone
    tests        the intervals behind its p; empty without a test, as while planned seeds are to come
    resolution   of the scores, as in `t_test`
    variance     of one seed, and of one problem of `num_problems`; None with fewer than 2 seeds
    cells        the same sums by problem, seeds by problems, or None
    share        the part of ALPHA that it may spend
    """

    differences: Mapping[int, float]
    interval: Interval | None
    tests: Sequence[Interval] = ()
    resolution: float = 0.0
    variance: CrossedVariance | None = None
    num_problems: int = 1
    cells: Floats | None = field(default=None, compare=False)
    share: float = 1.0
    student: Interval | None = None

    @property
    def p(self) -> float:
        """Of no difference: the largest of its tests', which is below 0.05 only if the widest interval excludes 0.

        NaN without tests, or if one of them is: a difference without spread whose scores were not counted.
        """
        ps = [statistics.t_test(test, self.resolution) for test in self.tests]
        return float(np.max(ps)) if ps else math.nan

    @property
    def values(self) -> list[float]:
        return list(self.differences.values())

    @property
    def estimate(self) -> float:
        return float(np.mean(self.values))


@dataclass(frozen=True, kw_only=True)
class Comparison(Contrast):
    """An arm minus the baseline; `family` is the number of p-values that Holm's correction spans."""

    summary: ArmSummary = field(compare=False)
    baseline: ArmSummary = field(compare=False)
    outcome: Outcome
    rng_seed: int
    p_adjusted: float = math.nan
    family: int = 1
    is_alone: bool = True  # all comparisons have this baseline, so that the arm names it
    is_paired: bool = True

    @property
    def arm(self) -> str:
        return self.summary.label

    @property
    def name(self) -> str:
        return self.arm if self.is_alone else f"{self.arm} - {self.baseline.label}"

    @property
    def bootstrap(self) -> Interval | None:
        return statistics.bootstrap_interval(self.values, self.rng_seed) if self.is_paired else None

    @property
    def is_detected(self) -> bool:
        return self.p_adjusted < ALPHA

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
        if self.variance is None or math.isnan(self.detectable) or not self.outcome.is_fraction:
            return {}
        plan = self.variance, self.num_problems, ALPHA / self.family, trials.share_at(self.share)
        return {size: statistics.seeds_needed(size, *plan) for size in PLANNED_DIFFERENCES}


@dataclass(frozen=True)
class Gap:
    """An (arm, seed) without a usable result, and why; `state` is its trial's or names the missing part."""

    arm: str
    seed: int
    state: str
    reason: str


@dataclass(frozen=True)
class ControlArm:
    """A control arm: its kind, its result, and the arms that share its task and its start, each minus it."""

    control: str
    summary: ArmSummary
    comparisons: Sequence[Comparison]
    gaps: Sequence[Gap]


@dataclass(frozen=True)
class Analysis:
    """All numbers of a report; only `controls` includes control arms, even `record` leaves them out.

    usable       the complete trials with a finite outcome
    comparisons  every arm that can be compared with the baseline
    same         the arms that by construction cannot differ from their reference: no hypothesis, so no p
    """

    record: StudyRecord
    outcome: Outcome
    usable: Trials
    arms: Sequence[ArmSummary]
    comparisons: Sequence[Comparison]
    gaps: Sequence[Gap]
    grid: Grid | None
    controls: Sequence[ControlArm]
    same: Sequence[str]

    @property
    def baseline(self) -> ArmSummary | None:
        return next((arm for arm in self.arms if arm.is_baseline), None)

    @property
    def finished_arms(self) -> list[ArmSummary]:
        return [arm for arm in self.arms if arm.scores]

    @cached_property
    def roles(self) -> dict[str, str]:
        """Arm -> its role among many, in the order of the palette; of equal arms the first is the highest or lowest."""
        search = trials.search_of(self.record)
        found = {search["best"]: "best of the search"} if search is not None and search["best"] else {}
        found |= {self.baseline.label: "baseline"} if self.baseline is not None else {}
        arms = self.finished_arms
        for choose, role in ((max, "highest arm"), (min, "lowest arm")) if arms else ():
            found.setdefault(choose(arms, key=lambda arm: arm.mean).label, role)
        return found

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
    everything, outcome, specs = record, trials.choose_outcome(record), trials.arm_specs(record.trials)
    controls = {arm: spec["control"] for arm, spec in specs.items() if spec.get("control")}
    labels = [arm for arm in dict.fromkeys([*record.arms, *(t.arm for t in record.trials)]) if arm not in controls]
    record = trials.with_arms(record, labels)
    usable = trials.usable_trials(record, outcome)
    arms = [trials.summarise(label, record, outcome, usable, rng) for label in labels]
    grid = grid_of(arms, record) if trials.search_of(record) is None else None
    by_label, references = {arm.label: arm for arm in arms}, record.references
    if not references and trials.search_of(record) is None:
        references = dict.fromkeys(by_label, record.baseline)
    twins = [(label, labels) for labels, _ in record.identical for label in labels]
    same = [label for label, labels in twins if label != (to := references.get(label, label)) and to in labels]
    pairs = [(arm, by_label[to]) for arm in arms if (to := references.get(arm.label, arm.label)) in by_label]
    compared, is_alone = _compare(pairs, record, outcome, rng), not record.references
    comparisons = [replace(c, is_alone=is_alone, tests=() if c.arm in same else c.tests) for c in compared]
    effects = grid.effects if grid is not None else ()
    # one that waits for seeds has no p yet, and yet its place in the family
    waits = [math.isnan(one.p) and one.share < 1 and one.arm not in same for one in comparisons]
    p_values = [1.0 if waiting else one.p for one, waiting in zip(comparisons, waits, strict=True)]
    p_values += [one.p for one in effects]
    adjusted = statistics.holm(p_values)
    family = max(len([p for p in p_values if not math.isnan(p)]), 1)
    known = [math.nan if math.isnan(one.p) else p for one, p in zip(comparisons, adjusted, strict=False)]
    comparisons = [replace(c, p_adjusted=p, family=family) for c, p in zip(comparisons, known, strict=True)]
    if grid is not None:
        after = adjusted[len(comparisons) :]
        grid = replace(grid, effects=[replace(one, p_adjusted=p) for one, p in zip(effects, after, strict=True)])
    found = []
    for label, control in controls.items():
        alone = trials.with_arms(everything, [label])
        mine = trials.usable_trials(alone, outcome)
        summary = trials.summarise(label, alone, outcome, mine, rng)
        start = [specs[label].get(key) for key in _START]
        alike = [arm for arm in arms if arm.label in specs and [specs[arm.label].get(key) for key in _START] == start]
        compared = _compare([(arm, summary) for arm in alike], everything, outcome, rng)
        found.append(ControlArm(control, summary, compared, _gaps(alone, mine)))
    return Analysis(record, outcome, usable, arms, comparisons, _gaps(record, usable), grid, found, same)


def contrast(record: StudyRecord, values: Mapping[str, Mapping[int, float]], weights: Mapping[str, float]) -> Contrast:
    """The weighted sum of arms for each seed, with t interval and test; `values` maps arm -> seed -> value.

    Of arms without common seeds the groups are independent (Welch 1947).
    """
    if trials.is_paired(record):
        seeds = sorted(seed for seed in values[next(iter(weights))] if all(seed in values[arm] for arm in weights))
        sums = {seed: sum(weight * values[arm][seed] for arm, weight in weights.items()) for seed in seeds}
        groups = [[*sums.values()]]
    else:
        groups = [[weight * value for _, value in sorted(values[arm].items())] for arm, weight in weights.items()]
        seeds, means = sorted(values[[*weights][-1]]), sum(float(np.mean(one)) for one in groups[:-1] if one)
        sums = {seed: value + means for seed, value in zip(seeds, groups[-1], strict=True)} if all(groups) else {}
    share = trials.share_of_alpha(record, seeds)
    intervals = statistics.cautious_intervals(*(np.array(one)[:, None] for one in groups), share=share)
    if not intervals:
        return Contrast(sums, None, share=share)
    spread = CrossedVariance(sum(float(np.var(one, ddof=1)) for one in groups), 0.0, 0.0)
    tests = () if trials.awaits_seeds(record, seeds) else intervals
    return Contrast(sums, intervals[0], tests, variance=spread, share=share, student=intervals[0])


def outcome_contrast(analysis: Analysis, weights: Mapping[str, float]) -> Contrast:
    """The same for the study's outcome, over seeds and problems if the scores of single problems are known."""
    return _of_outcome(analysis.record, analysis.outcome, {arm.label: arm for arm in analysis.arms}, weights)


def _of_outcome(
    record: StudyRecord, outcome: Outcome, arms: Mapping[str, ArmSummary], weights: Mapping[str, float]
) -> Contrast:
    found = contrast(record, {label: arm.scores for label, arm in arms.items()}, weights)
    ends = sum(min(weight, 0.0) for weight in weights.values()), sum(max(weight, 0.0) for weight in weights.values())
    counted, paired = arms[next(iter(weights))].num_problems, trials.is_paired(record)
    found = replace(found, resolution=1 / counted if counted else 0.0)
    cells = [(w, arms[label].cells_of(found.differences if paired else arms[label].scores))
             for label, w in weights.items()]  # fmt: skip
    weighted = [weight * rows for weight, rows in cells if rows is not None]
    is_known = len(weighted) == len(weights)
    groups = ([np.sum(weighted, axis=0)] if paired else weighted) if is_known else []
    summed = groups[0] if paired and groups else None
    found = replace(found, cells=summed, student=trials.bounded(found.student, outcome, *ends))
    if found.interval is None:
        return found
    intervals = statistics.cautious_intervals(*groups, share=found.share) if groups else [found.interval]
    counted = groups[0].shape[1] if groups else counted
    is_fixed = all(value in (0.0, 1.0) for label in weights for value in arms[label].values)
    others = statistics.num_others(np.concatenate(weighted)) if is_known else 0 if is_fixed else counted
    sparse = []  # the first of its tests, so that no statement goes without it
    if others < min(statistics.RARE, counted / 4):
        scale = max(ends[1], -ends[0])
        sparse = [statistics.sparse_interval(found.estimate, counted, others, found.share, scale)]
    found = replace(
        found,
        interval=trials.bounded(statistics.widest([*sparse, *intervals]), outcome, *ends),
        tests=[*sparse, *found.tests, *intervals[1:]] if found.tests else (),
    )
    if not groups:
        return found
    return replace(found, variance=statistics.crossed_variance(*groups), num_problems=counted)


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
            mine = [usable[arm.label, seed] for seed in arm.scores]
            values = [value for trial in mine if (value := trials.score(trial, name)) is not None]
            if name == analysis.outcome.name:
                found[name][arm.label] = (arm.mean, arm.interval)
            elif len(values) == len(mine):
                interval = statistics.t_interval(values, trials.share_of_alpha(analysis.record, arm.scores))
                interval = trials.bounded(interval, outcome, num_problems=trials.num_problems(mine, outcome))
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
        if arm is baseline or (trials.is_paired(record) and arm.scores.keys().isdisjoint(baseline.scores)):
            continue
        if not (arm.scores and baseline.scores):
            continue
        both = {baseline.label: baseline, arm.label: arm}
        one = _of_outcome(record, outcome, both, {baseline.label: -1.0, arm.label: 1.0})
        own = {
            "summary": arm,
            "baseline": baseline,
            "is_paired": trials.is_paired(record),
            "outcome": outcome,
            "rng_seed": int(rng.integers(2**32)),
        }
        found.append(Comparison(**vars(one), **own))
    return found


def _gaps(record: StudyRecord, usable: Trials) -> list[Gap]:
    by_pair = {(trial.arm, trial.seed): trial for trial in record.trials}
    searched = {arm["label"]: arm["state"] for arm in (record.search or {}).get("arms", ())}
    gaps = []
    for arm, seed in dict.fromkeys([*trials.wanted_pairs(record), *by_pair]):
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
