"""Decides what a study's trials say: the outcome that is compared, each arm's estimate, the comparisons, the gaps.

Only complete trials count; the others are listed with their reason. Arms are compared with the baseline over the
seeds that both completed and the same test problems, because equal seeds share prompts, noise and initial weights
(common random numbers), and the p-values of a study form one Holm family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.random import Generator

from harness.types import StudyRecord, TrialRecord, TrialState
from reports import statistics
from reports.anova import Effect, anova
from reports.join import JoinedStudy
from reports.statistics import ALPHA, CrossedVariance, Floats, Interval, McNemar

POWER = 0.8
PLANNED_DIFFERENCES = (0.01, 0.02, 0.05, 0.10)
_FRACTIONS = ("accuracy", "answered", "truncated", "clip_fraction", "zero_variance_groups")


@dataclass(frozen=True)
class Outcome:
    """The number that the arms are compared by: its metric name, and whether single problems are known for it."""

    name: str
    per_problem: bool

    @property
    def is_fraction(self) -> bool:
        return is_fraction(self.name)

    @property
    def label(self) -> str:
        return self.name.replace("/", " ").replace("_", " ")


@dataclass(frozen=True)
class ArmSummary:
    """One arm over its complete trials.

    scores   seed -> outcome; empty without a complete trial
    cells    fraction right, seeds (in the order of `scores`) by problems, or None
    interval the report's default; None with fewer than 2 seeds
    costs    mean over seeds of the numbers of `TrialRecord.summary`; peak_memory_bytes is the largest
    states   number of trials in each state
    """

    label: str
    algorithm: str
    is_baseline: bool
    factors: Mapping[str, Any]
    scores: Mapping[int, float]
    cells: Floats | None
    interval: Interval | None
    student: Interval | None
    bootstrap: Interval | None
    crossed_bootstrap: Interval | None
    costs: Mapping[str, float]
    states: Mapping[str, int]

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.scores.values()))) if self.scores else math.nan

    @property
    def interquartile_mean(self) -> float:
        return statistics.interquartile_mean(list(self.scores.values())) if self.scores else math.nan


@dataclass(frozen=True)
class Comparison:
    """An arm minus the baseline over `seeds`, the seeds that both completed; intervals are None with fewer than 2.

    detectable    the true difference that this design finds with probability 0.8 after Holm's first step
    seeds_needed  seeds per arm to find the observed difference with that probability; None where 200 would not do
    seeds_for     the same for each of the planned differences (fractions); empty where no variance is known
    sign_flip_p   exact and free of normality, but never below 2 / 2^seeds
    mcnemar       majority verdicts on single problems, where those are known
    """

    arm: str
    seeds: tuple[int, ...]
    estimate: float
    interval: Interval | None
    student: Interval | None
    bootstrap: Interval | None
    crossed_bootstrap: Interval | None
    p: float
    p_adjusted: float
    sign_flip_p: float
    improvement: Interval
    mcnemar: McNemar | None
    detectable: float
    seeds_needed: int | None
    seeds_for: Mapping[float, int | None]

    @property
    def is_detected(self) -> bool:
        return self.p_adjusted < ALPHA


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of arms over the seeds that all of them completed; `interval` is the one that reports state."""

    differences: Mapping[int, float]
    interval: Interval | None
    p: float

    @property
    def estimate(self) -> float:
        return float(np.mean(list(self.differences.values())))


@dataclass(frozen=True)
class Gap:
    """An (arm, seed) without a usable result, and why."""

    arm: str
    seed: int
    state: TrialState | str
    reason: str


@dataclass(frozen=True)
class Grid:
    """A full factorial: `labels[i, j, ...]` is the arm at level i of the first factor, j of the second, ...

    `effects` is empty where a cell or a seed is missing.
    """

    factors: tuple[str, ...]
    levels: tuple[tuple[Any, ...], ...]
    labels: np.ndarray
    effects: Sequence[Effect]


@dataclass(frozen=True)
class Analysis:
    """All numbers of a report. `comparisons` holds every arm but the baseline that can be compared with it."""

    record: StudyRecord
    outcome: Outcome
    arms: Sequence[ArmSummary]
    comparisons: Sequence[Comparison]
    gaps: Sequence[Gap]
    grid: Grid | None

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


def analyse(record: StudyRecord, rng: Generator) -> Analysis:
    """The study's numbers; `rng` draws the bootstrap resamples."""
    outcome = choose_outcome(record)
    usable = usable_trials(record, outcome)
    labels = list(dict.fromkeys([*record.arms, *(trial.arm for trial in record.trials)]))
    arms = [_summarise(label, record, outcome, usable, rng) for label in labels]
    comparisons = _compare(arms, outcome, rng)
    return Analysis(record, outcome, arms, comparisons, _gaps(record, usable), _grid(record, arms))


def choose_outcome(record: StudyRecord) -> Outcome:
    """The study's metric on the test split where every complete trial has it, otherwise the metric itself.

    A metric of the validation split guides tuning; the test split is scored once, at the end, so it decides.
    """
    complete = [trial for trial in record.trials if trial.state == "complete"]
    area, _, quantity = record.metric.partition("/")
    test = f"test/{quantity}"
    if area == "validation" and complete and all(score(trial, test) is not None for trial in complete):
        problems = {frozenset(trial.per_problem) for trial in complete}
        return Outcome(test, quantity == "accuracy" and len(problems) == 1 and len(problems.pop()) > 1)
    return Outcome(record.metric, False)


def usable_trials(record: StudyRecord, outcome: Outcome) -> dict[tuple[str, int], TrialRecord]:
    """(arm, seed) -> its complete trial with a finite outcome. ValueError where two trials claim one pair."""
    found: dict[tuple[str, int], TrialRecord] = {}
    for trial in record.trials:
        if trial.state != "complete" or score(trial, outcome.name) is None:
            continue
        key = (trial.arm, trial.seed)
        if key in found:
            raise ValueError(
                f"study '{record.name}': each (arm, seed) must be complete once, got trials {found[key].trial} and "
                f"{trial.trial} for arm '{trial.arm}', seed {trial.seed}; delete one of the two runs"
            )
        found[key] = trial
    return found


def contrast(values: Mapping[str, Mapping[int, float]], weights: Mapping[str, float]) -> Contrast:
    """The weighted sum of arms for each seed, with t interval and test over seeds; `values`: arm -> seed -> value."""
    seeds = [seed for seed in values[next(iter(weights))] if all(seed in values[arm] for arm in weights)]
    sums = {seed: sum(weight * values[arm][seed] for arm, weight in weights.items()) for seed in seeds}
    interval = statistics.t_interval(list(sums.values()))
    return Contrast(sums, interval, statistics.t_test(interval) if interval is not None else math.nan)


def outcome_contrast(arms: Mapping[str, ArmSummary], weights: Mapping[str, float]) -> Contrast:
    """The same for the study's outcome, over seeds and problems where those are known."""
    found = contrast({arm: arms[arm].scores for arm in weights}, weights)
    cells = [(weight, arms[arm], arms[arm].cells) for arm, weight in weights.items()]
    if found.interval is None or any(one is None for _, _, one in cells):
        return found
    rows = [
        weight * one[[list(arm.scores).index(seed) for seed in found.differences]]
        for weight, arm, one in cells
        if one is not None
    ]
    summed = np.sum(rows, axis=0)
    return Contrast(found.differences, statistics.cautious_interval(summed), _p_value(None, found.differences, summed))


def wanted_pairs(record: StudyRecord) -> list[tuple[str, int]]:
    """The (arm, seed) pairs that a study asks for, in its order."""
    seeds = record.arm_seeds if isinstance(record, JoinedStudy) else dict.fromkeys(record.arms, record.seeds)
    return [(arm, seed) for arm in record.arms for seed in seeds[arm]]


def level_means(analysis: Analysis, factor: str) -> dict[Any, float]:
    """Level -> mean outcome over the arms at that level, each arm counting once; empty where an arm has no result."""
    if analysis.grid is None:
        return {}
    levels = analysis.grid.levels[analysis.grid.factors.index(factor)]
    means = {level: [arm.mean for arm in analysis.arms if arm.factors.get(factor) == level] for level in levels}
    if any(math.isnan(mean) for values in means.values() for mean in values):
        return {}
    return {level: float(np.mean(values)) for level, values in means.items()}


def marginal(analysis: Analysis, levels: Mapping[str, Any]) -> Contrast | None:
    """The mean outcome of the grid's arms at these levels, over what else varies; None where an arm has no result."""
    arms = {
        arm.label: arm
        for arm in analysis.arms
        if arm.factors and all(arm.factors.get(factor) == level for factor, level in levels.items())
    }
    if not arms or not set.intersection(*(set(arm.scores) for arm in arms.values())):
        return None
    return outcome_contrast(arms, dict.fromkeys(arms, 1 / len(arms)))


def score(trial: TrialRecord, metric: str) -> float | None:
    """The last value of a metric in a trial; None where there is none or it is not finite."""
    series = trial.history.get(metric)
    summary = {"test/accuracy": "test_accuracy", "validation/accuracy": "accuracy_final"}.get(metric, "")
    value = trial.summary.get(summary, series[-1][1] if series else None)
    return float(value) if value is not None and math.isfinite(value) else None


def is_fraction(metric: str) -> bool:
    """Whether a metric is a fraction in [0, 1], shown in percent."""
    quantity = metric.rpartition("/")[2]
    return quantity.endswith(_FRACTIONS) or quantity.startswith(("accuracy_", "pass_at_", "maj_at_"))


def setting(trial_spec: Mapping[str, Any], dotted: str, default: Any = None) -> Any:
    """The value at a dotted path of a run's spec, or `default`."""
    value: Any = trial_spec
    for key in dotted.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def _summarise(
    label: str,
    record: StudyRecord,
    outcome: Outcome,
    usable: Mapping[tuple[str, int], TrialRecord],
    rng: Generator,
) -> ArmSummary:
    trials = [trial for trial in record.trials if trial.arm == label]
    mine = sorted((trial for (arm, _), trial in usable.items() if arm == label), key=lambda trial: trial.seed)
    scores = {trial.seed: value for trial in mine if (value := score(trial, outcome.name)) is not None}
    cells = _cells(mine) if outcome.per_problem and mine else None
    values = list(scores.values())
    student = _bounded(statistics.t_interval(values), outcome)
    interval = _bounded(statistics.cautious_interval(cells), outcome) if cells is not None else student
    if interval is not None and interval.error == 0 and outcome.is_fraction:
        interval = _without_spread(interval, mine, outcome)
    states = [trial.state for trial in trials]
    return ArmSummary(
        label=label,
        algorithm=str(setting(trials[0].spec, "algorithm.name", "")) if trials else "",
        is_baseline=label == record.baseline,
        factors=trials[0].factors if trials else {},
        scores=scores,
        cells=cells,
        interval=interval,
        student=student,
        bootstrap=statistics.bootstrap_interval(values, rng),
        crossed_bootstrap=statistics.crossed_bootstrap_interval(cells, rng) if cells is not None else None,
        costs=_costs(mine),
        states={state: states.count(state) for state in dict.fromkeys(states)},
    )


def _cells(trials: Sequence[TrialRecord]) -> Floats:
    problems = sorted(trials[0].per_problem)
    return np.array([[trial.per_problem[problem] for problem in problems] for trial in trials], dtype=float)


def _bounded(interval: Interval | None, outcome: Outcome) -> Interval | None:
    return interval.clipped(0.0, 1.0) if interval is not None and outcome.is_fraction else interval


def _without_spread(interval: Interval, trials: Sequence[TrialRecord], outcome: Outcome) -> Interval:
    """Equal seeds at 0 or 1 leave no spread to estimate: the exact interval over problems, where they are counted."""
    counted = trials[0].history.get(f"{outcome.name.partition('/')[0]}/num_prompts")
    num_problems = len(trials[0].per_problem) if outcome.per_problem else int(counted[-1][1]) if counted else 0
    if interval.estimate in (0.0, 1.0) and num_problems:
        return statistics.exact_interval(interval.estimate, num_problems)
    return interval


def _costs(trials: Sequence[TrialRecord]) -> dict[str, float]:
    costs: dict[str, float] = {}
    for key in dict.fromkeys(key for trial in trials for key in trial.summary):
        values = [trial.summary[key] for trial in trials if math.isfinite(trial.summary.get(key, math.nan))]
        if values:
            costs[key] = float(np.max(values) if key == "peak_memory_bytes" else np.mean(values))
    return costs


def _compare(arms: Sequence[ArmSummary], outcome: Outcome, rng: Generator) -> list[Comparison]:
    baseline = next((arm for arm in arms if arm.is_baseline and arm.scores), None)
    others = [arm for arm in arms if baseline and arm is not baseline and set(arm.scores) & set(baseline.scores)]
    if baseline is None or not others:
        return []
    pairs = [_pair(arm, baseline) for arm in others]
    intervals = [_difference(*pair, arm, baseline) for arm, pair in zip(others, pairs, strict=True)]
    p_values = [_p_value(interval, *pair) for interval, pair in zip(intervals, pairs, strict=True)]
    family = max(sum(not math.isnan(p) for p in p_values), 1)
    result = []
    for arm, (differences, cells), interval, p, adjusted in zip(
        others, pairs, intervals, p_values, statistics.holm(p_values), strict=True
    ):
        values = list(differences.values())
        testable = interval is not None and interval.error > 0
        exact = 2 <= len(values) <= statistics.EXACT_SIGN_FLIPS
        result.append(
            Comparison(
                arm=arm.label,
                seeds=tuple(differences),
                estimate=float(np.mean(values)),
                interval=interval,
                student=statistics.t_interval(values),
                bootstrap=statistics.bootstrap_interval(values, rng),
                crossed_bootstrap=statistics.crossed_bootstrap_interval(cells, rng) if cells is not None else None,
                p=p,
                p_adjusted=adjusted,
                sign_flip_p=statistics.sign_flip_test(values) if exact else math.nan,
                improvement=_improvement(arm, baseline),
                mcnemar=_mcnemar(arm, baseline, tuple(differences)),
                detectable=statistics.minimum_detectable_difference(interval.error, interval.df, ALPHA / family, POWER)
                if interval is not None and testable
                else math.nan,
                seeds_needed=_seeds_needed(float(np.mean(values)), values, cells, family) if testable else None,
                seeds_for={size: _seeds_needed(size, values, cells, family) for size in PLANNED_DIFFERENCES}
                if testable and outcome.is_fraction
                else {},
            )
        )
    return result


def _pair(arm: ArmSummary, baseline: ArmSummary) -> tuple[dict[int, float], Floats | None]:
    """Differences over shared seeds, and per problem where both are known."""
    seeds = [seed for seed in arm.scores if seed in baseline.scores]
    differences = {seed: arm.scores[seed] - baseline.scores[seed] for seed in seeds}
    if arm.cells is None or baseline.cells is None:
        return differences, None
    rows, base_rows = ([list(one.scores).index(seed) for seed in seeds] for one in (arm, baseline))
    return differences, arm.cells[rows] - baseline.cells[base_rows]


def _difference(
    differences: Mapping[int, float], cells: Floats | None, arm: ArmSummary, baseline: ArmSummary
) -> Interval | None:
    """The stated interval of a paired difference; between arms that are all right or all wrong, what theirs allow."""
    if cells is not None:
        interval = statistics.cautious_interval(cells)
    else:
        interval = statistics.t_interval(list(differences.values()))
    if interval is None or interval.error > 0 or arm.interval is None or baseline.interval is None:
        return interval
    low, high = arm.interval.low - baseline.interval.high, arm.interval.high - baseline.interval.low
    spread = any(value not in (0.0, 1.0) for one in (arm, baseline) for value in one.scores.values())
    return interval if spread else replace(interval, low=low, high=high)


def _p_value(interval: Interval | None, differences: Mapping[int, float], cells: Floats | None) -> float:
    """The larger of the p-values behind a cautious interval, so that it is below 0.05 where the interval excludes 0."""
    tests = [interval, statistics.t_interval(list(differences.values()))]
    if cells is not None:
        tests.append(statistics.crossed_interval(cells))
    return max((statistics.t_test(test) for test in tests if test is not None), default=math.nan)


def _seeds_needed(difference: float, values: Sequence[float], cells: Floats | None, family: int) -> int | None:
    if cells is not None:
        variance, problems = statistics.crossed_variance(cells), cells.shape[1]
    else:
        variance, problems = CrossedVariance(float(np.var(values, ddof=1)), 0.0, 0.0), 1
    return statistics.seeds_needed(difference, variance, problems, ALPHA / family, POWER)


def _improvement(arm: ArmSummary, baseline: ArmSummary) -> Interval:
    probability = statistics.probability_of_improvement(list(arm.scores.values()), list(baseline.scores.values()))
    return statistics.improvement_interval(probability, len(arm.scores), len(baseline.scores))


def _mcnemar(arm: ArmSummary, baseline: ArmSummary, seeds: Sequence[int]) -> McNemar | None:
    """Majority verdicts of both arms over the seeds that they share."""
    if arm.cells is None or baseline.cells is None:
        return None
    verdicts = [
        statistics.majority_verdicts(one.cells[[list(one.scores).index(seed) for seed in seeds]])
        for one in (arm, baseline)
        if one.cells is not None
    ]
    return statistics.mcnemar_test(*verdicts)


def _gaps(record: StudyRecord, usable: Mapping[tuple[str, int], TrialRecord]) -> list[Gap]:
    by_pair = {(trial.arm, trial.seed): trial for trial in record.trials}
    pairs = dict.fromkeys([*wanted_pairs(record), *by_pair])
    searched = {arm["label"]: arm["state"] for arm in (record.search or {}).get("arms", ())}
    gaps = []
    for arm, seed in pairs:
        if (arm, seed) in usable:
            continue
        trial = by_pair.get((arm, seed))
        if searched.get(arm) == "pruned":
            reason = trial.reason if trial else None
            gaps.append(Gap(arm, seed, "pruned", reason or "the search gave this arm up early"))
        elif trial is None:
            gaps.append(Gap(arm, seed, "not started", "no trial yet"))
        elif trial.state == "complete":
            gaps.append(Gap(arm, seed, "no value", trial.reason or "complete, but without a finite outcome"))
        else:
            gaps.append(Gap(arm, seed, trial.state, trial.reason or "no reason recorded"))
    return gaps


def _grid(record: StudyRecord, arms: Sequence[ArmSummary]) -> Grid | None:
    """The factorial that the arms form, or None: at least 2 factors, or one of at least 3 numeric levels."""
    known = [arm for arm in arms if arm.factors]
    names = list(dict.fromkeys(name for arm in known for name in arm.factors))
    if not known or any(set(arm.factors) != set(names) for arm in known):
        return None
    levels = {name: tuple(dict.fromkeys(arm.factors[name] for arm in known)) for name in names}
    varied = tuple(name for name in names if len(levels[name]) > 1)
    shape = tuple(len(levels[name]) for name in varied)
    place = {tuple(levels[name].index(arm.factors[name]) for name in varied): arm for arm in known}
    if not varied or (len(varied) == 1 and (shape[0] < 3 or not _numeric(levels[varied[0]]))):
        return None
    if len(place) != len(known) or len(place) != math.prod(shape):
        return None
    ordered = {name: _ordered(levels[name]) for name in varied}
    labels = np.empty(shape, dtype=object)
    for arm in known:
        labels[tuple(ordered[name].index(arm.factors[name]) for name in varied)] = arm.label
    effects = _effects(varied, labels, {arm.label: arm for arm in known})
    return Grid(varied, tuple(ordered[name] for name in varied), labels, effects)


def _ordered(levels: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(sorted(levels)) if _numeric(levels) else levels


def _numeric(levels: tuple[Any, ...]) -> bool:
    return all(isinstance(level, int | float) and not isinstance(level, bool) for level in levels)


def _effects(factors: tuple[str, ...], labels: np.ndarray, arms: Mapping[str, ArmSummary]) -> list[Effect]:
    seeds = sorted(set.intersection(*(set(arm.scores) for arm in arms.values())))
    if len(seeds) < 2:
        return []
    scores = [[arms[label].scores[seed] for seed in seeds] for label in labels.flat]
    return anova(np.array(scores).reshape(*labels.shape, len(seeds)), factors)
