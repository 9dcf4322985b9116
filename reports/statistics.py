"""Decides how sure a study may be: intervals, paired differences, tests and effect sizes for few seeds.

Notation: S seeds, N test problems, K samples of each problem; `scores_S` holds one number per seed, `scores_SN` the
fraction of the K samples that were right, per seed and problem. Randomness comes only from the `numpy.random.Generator`
that is passed in.

Which interval. Seeds and problems are crossed random effects: every seed is scored on the same problems.
`SIMULATED_COVERAGE` holds how often each nominal 95 % interval encloses the accuracy of an arm on new seeds and new
problems of the same kind (512 problems, 4 samples each, accuracy 71 %, seeds with a standard deviation of 2.5 points;
4000 simulated studies; `tests/test_statistics.py` repeats it with fewer).

The percentile bootstrap cannot work with 3 seeds: its interval ends at the lowest and the highest seed, which enclose
the truth in 1 - 2 / 2^3 = 75 % of studies. The Student t interval over seeds covers 95 % for these very problems
(normal seeds, measured 95.1, 94.8 and 94.9 %), but not for new problems, which all seeds share. Reports therefore state
the wider of the two-way and the Student t interval where the scores of single problems are known, Student's over seeds
where they are not, and show the bootstrap beside it. The same holds for paired differences. For the probability of
improvement, whose bootstrap is a point where two arms do not overlap, reports state Newcombe's interval.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LEVEL = 0.95
EXACT_SIGN_FLIPS = 16

# Method -> seeds -> percent; the text at the top says of what. P(higher) is the probability of improvement of an arm
# whose normal seeds are 0, 1 or 2 standard deviations higher.
SIMULATED_COVERAGE = {
    "Stated: the wider of two-way t and Student t": {3: 95.6, 5: 94.5, 10: 95.5},
    "Two-way t over seeds and problems": {3: 93.2, 5: 94.4, 10: 95.5},
    "Student t over seeds": {3: 93.4, 5: 90.8, 10: 85.5},
    "Bootstrap over seeds and problems": {3: 89.2, 5: 93.1, 10: 95.2},
    "Percentile bootstrap over seeds": {3: 70.6, 5: 75.1, 10: 77.1},
    "Stated for a difference: the wider of the two, paired": {3: 96.9, 5: 94.7, 10: 94.8},
    "Bootstrap over seeds and problems, of a difference": {3: 85.9, 5: 90.6, 10: 94.9},
    "Stated for P(higher): Newcombe": {3: 93.4, 5: 95.2, 10: 95.8},
    "Bootstrap over seeds, of P(higher)": {3: 63.3, 5: 81.2, 10: 90.9},
}


@dataclass(frozen=True)
class Interval:
    """An estimate with its two-sided interval.

    `error` is the standard error and `df` its degrees of freedom where the method has them, otherwise NaN.
    """

    estimate: float
    low: float
    high: float
    error: float = math.nan
    df: float = math.nan

    def clipped(self, low: float, high: float) -> Interval:
        """The same interval without the impossible values outside [low, high]."""
        return Interval(self.estimate, max(self.low, low), min(self.high, high), self.error, self.df)


@dataclass(frozen=True)
class CrossedVariance:
    """Variance components of seeds crossed with problems (two-way random effects without replication).

    `seed`, `problem` and `rest` (their interaction and sampling noise) are variances of one cell; negative estimates
    are set to 0.
    """

    seed: float
    problem: float
    rest: float

    def of_mean(self, num_seeds: float, num_problems: float) -> float:
        """Variance of the mean over that many seeds and problems."""
        return self.seed / num_seeds + self.problem / num_problems + self.rest / (num_seeds * num_problems)


@dataclass(frozen=True)
class McNemar:
    """Problems that one of two arms alone gets right, and the exact two-sided p-value of an even split."""

    only_arm: int
    only_baseline: int
    p: float


@dataclass(frozen=True)
class Effect:
    """One row of an analysis of variance; `p_adjusted` is Holm's over the rows.

    `partial_omega_squared` is the less biased effect size, at least 0.
    """

    factors: tuple[str, ...]
    sum_of_squares: float
    df: int
    f: float
    p: float
    p_adjusted: float
    partial_omega_squared: float


def interquartile_mean(scores_S: ArrayLike) -> float:
    """Mean of the middle half (Agarwal et al. 2021, arXiv:2108.13264); with fewer than 4 values the plain mean."""
    return float(stats.trim_mean(np.asarray(scores_S, dtype=float), 0.25))


def t_interval(scores_S: ArrayLike, level: float = LEVEL) -> Interval | None:
    """Student's interval for the mean over seeds, given these test problems; None with fewer than 2 seeds.

    Exact for normally distributed seeds (Student 1908). It says nothing about other problems: all seeds share them.
    """
    values = np.asarray(scores_S, dtype=float)
    if values.size < 2:
        return None
    error = float(values.std(ddof=1)) / math.sqrt(values.size)
    return _t_interval(float(values.mean()), error, values.size - 1, level)


def crossed_interval(scores_SN: ArrayLike, level: float = LEVEL) -> Interval | None:
    """The t interval for the mean over new seeds and new problems; None with fewer than 2 of either.

    Two-way random effects (Cornfield and Tukey 1956): the variance of the mean is
    (MS_seed + MS_problem - MS_rest) / (S N), its degrees of freedom are Satterthwaite's (1946). A negative variance
    component is set to 0, which can only widen the interval.
    """
    scores = np.asarray(scores_SN, dtype=float)
    if scores.ndim != 2 or min(scores.shape) < 2:
        return None
    cells = scores.size
    seed, problem, rest = _mean_squares(scores)
    if seed == problem == rest == 0:
        return _t_interval(float(scores.flat[0]), 0.0, scores.shape[0] - 1, level)
    seed, problem = max(seed, rest), max(problem, rest)
    total = seed + problem - rest
    df_seed, df_problem = scores.shape[0] - 1, scores.shape[1] - 1
    spread = seed**2 / df_seed + problem**2 / df_problem + rest**2 / (df_seed * df_problem)
    df = max(total**2 / spread, 1.0)
    return _t_interval(float(scores.mean()), math.sqrt(total / cells), df, level)


def cautious_interval(scores_SN: ArrayLike, level: float = LEVEL) -> Interval | None:
    """The wider of `crossed_interval` and `t_interval` over the seeds: what reports state; None without both.

    Two rough estimates of spread stand behind few seeds; taking the wider interval, a statement about new problems
    too is never more certain than one about these problems alone, and coverage holds from 2 seeds on.
    """
    scores = np.asarray(scores_SN, dtype=float)
    crossed = crossed_interval(scores, level)
    student = t_interval(scores.mean(axis=1), level) if crossed is not None else None
    if crossed is None or student is None:
        return None
    return max(crossed, student, key=lambda interval: interval.high - interval.low)


def crossed_variance(scores_SN: ArrayLike) -> CrossedVariance:
    """Variance components from at least 2 seeds and 2 problems, by the method of moments."""
    scores = np.asarray(scores_SN, dtype=float)
    seed, problem, rest = _mean_squares(scores)
    num_seeds, num_problems = scores.shape
    return CrossedVariance(max(seed - rest, 0.0) / num_problems, max(problem - rest, 0.0) / num_seeds, rest)


def exact_interval(fraction: float, num_problems: int, level: float = LEVEL) -> Interval:
    """Clopper-Pearson (1934) for a fraction of problems; 0 of n reaches up to 1 - (alpha / 2)^(1 / n)."""
    found = stats.binomtest(round(fraction * num_problems), num_problems).proportion_ci(level, "exact")
    return Interval(fraction, float(found.low), float(found.high))


def bootstrap_interval(
    scores_S: ArrayLike, rng: Generator, level: float = LEVEL, resamples: int = 10_000
) -> Interval | None:
    """Percentile bootstrap over seeds (Efron 1979); None with fewer than 2 seeds.

    Too narrow for few seeds, whatever the number of resamples: see the table at the top.
    """
    values = np.asarray(scores_S, dtype=float)
    if values.size < 2:
        return None
    means = rng.choice(values, size=(resamples, values.size)).mean(axis=1)
    return _percentiles(float(values.mean()), means, level)


def crossed_bootstrap_interval(
    scores_SN: ArrayLike, rng: Generator, level: float = LEVEL, resamples: int = 4000
) -> Interval | None:
    """Percentile bootstrap that resamples seeds and problems independently; None with fewer than 2 of either.

    The pigeonhole bootstrap (Owen 2007, doi:10.1214/07-AOAS122) for crossed effects: rows and columns are weighted by
    how often they were drawn.
    """
    scores = np.asarray(scores_SN, dtype=float)
    if scores.ndim != 2 or min(scores.shape) < 2:
        return None
    num_seeds, num_problems = scores.shape
    seeds, problems = (_times_drawn(size, resamples, rng) for size in (num_seeds, num_problems))
    means = np.einsum("bn,bn->b", seeds @ scores, problems) / scores.size
    return _percentiles(float(scores.mean()), means, level)


def t_test(difference: Interval) -> float:
    """Two-sided p-value of a difference of 0, from the interval's own error and degrees of freedom; NaN without."""
    if math.isnan(difference.error):
        return math.nan
    if difference.error == 0:
        return 1.0 if difference.estimate == 0 else 0.0
    return float(2 * stats.t.sf(abs(difference.estimate) / difference.error, difference.df))


def sign_flip_test(differences_S: ArrayLike) -> float:
    """Exact two-sided p-value of paired differences whose sign is arbitrary (Fisher 1935), without normality.

    With S seeds it cannot fall below 2 / 2^S: 0.25 for 3 seeds. ValueError above 16 seeds.
    """
    differences = np.asarray(differences_S, dtype=float)
    if differences.size > EXACT_SIGN_FLIPS:
        raise ValueError(f"sign_flip_test enumerates at most {EXACT_SIGN_FLIPS} pairs, got {differences.size}")
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=differences.size)))
    sums = np.abs(signs @ differences)
    observed = abs(float(differences.sum()))
    return float(np.mean(sums >= observed * (1 - 1e-9)))


def majority_verdicts(scores_SN: ArrayLike) -> Bools:
    """Whether an arm gets each problem right: more than half of all its samples, those of all seeds together, are."""
    return np.asarray(scores_SN, dtype=float).mean(axis=0) > 0.5


def mcnemar_test(right_N: ArrayLike, baseline_right_N: ArrayLike) -> McNemar:
    """The exact test of paired verdicts (McNemar 1947): problems that both or neither get right say nothing.

    It speaks about these very models on new problems. Training with another seed moves many verdicts at once, which the
    test takes for evidence, so that it must not decide whether one algorithm is better than another.
    """
    arm, baseline = np.asarray(right_N, dtype=bool), np.asarray(baseline_right_N, dtype=bool)
    only_arm, only_baseline = int((arm & ~baseline).sum()), int((baseline & ~arm).sum())
    discordant = only_arm + only_baseline
    p = float(stats.binomtest(only_arm, discordant).pvalue) if discordant else 1.0
    return McNemar(only_arm, only_baseline, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values that keep the chance of any false discovery below alpha (Holm 1979). NaN stays NaN."""
    adjusted = [math.nan] * len(p_values)
    ordered = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    largest = 0.0
    for rank, (p, index) in enumerate(ordered):
        largest = max(largest, min(1.0, (len(ordered) - rank) * p))
        adjusted[index] = largest
    return adjusted


def probability_of_improvement(scores_S: ArrayLike, baseline_S: ArrayLike) -> float:
    """Chance that a run of the arm beats a run of the baseline, ties counting half (Agarwal et al. 2021, eq. 1).

    A second axis holds tasks, whose probabilities are averaged.
    """
    arm, baseline = np.asarray(scores_S, dtype=float)[:, None], np.asarray(baseline_S, dtype=float)[None, :]
    return float(np.mean((arm > baseline) + 0.5 * (arm == baseline)))


def improvement_interval(probability: float, num_seeds: int, num_baseline: int, level: float = LEVEL) -> Interval:
    """The interval of a probability of improvement between arms with that many seeds (Newcombe 2006, method 5).

    Its limits are where the squared distance to the estimate is z^2 times the variance of Hanley and McNeil (1982) at
    the limit itself, with both counts in it replaced by their mean (doi:10.1002/sim.2324). Unlike the bootstrap it does
    not shrink to a point where the arms do not overlap. It treats the arms as independent, which is cautious where they
    share seeds.
    """
    z, runs = float(stats.norm.isf((1 - level) / 2)), (num_seeds + num_baseline) / 2 - 1

    def excess(limit: float) -> float:
        spread = 1 + runs * (1 - limit) / (2 - limit) + runs * limit / (1 + limit)
        return (limit - probability) ** 2 - z**2 * limit * (1 - limit) * spread / (num_seeds * num_baseline)

    edge = 1e-9  # the equation has a root of its own at an estimate of 0 or 1
    low = 0.0 if probability == 0 else _root(excess, edge, min(probability, 1 - edge))
    high = 1.0 if probability == 1 else _root(excess, max(probability, edge), 1 - edge)
    return Interval(probability, low, high)


def improvement_bootstrap_interval(
    scores_S: ArrayLike, baseline_S: ArrayLike, rng: Generator, level: float = LEVEL, resamples: int = 2000
) -> Interval | None:
    """Percentile bootstrap of the probability of improvement, the runs of each arm drawn on their own (Agarwal et al.).

    None with fewer than 2 seeds of either. Too narrow for few seeds: see the table at the top.
    """
    arm, baseline = np.asarray(scores_S, dtype=float), np.asarray(baseline_S, dtype=float)
    if min(arm.size, baseline.size) < 2:
        return None
    beats = (arm[:, None] > baseline) + 0.5 * (arm[:, None] == baseline)
    rows, columns = (_times_drawn(one.size, resamples, rng) for one in (arm, baseline))
    shares = np.einsum("bm,bm->b", rows @ beats, columns) / beats.size
    return _percentiles(float(beats.mean()), shares, level)


def minimum_detectable_difference(error: float, df: float, alpha: float = 0.05, power: float = 0.8) -> float:
    """The true difference that a two-sided t test at `alpha` finds with probability `power`.

    From the non-central t distribution; as uncertain as `error` itself, so a guide and no guarantee.
    """
    if error == 0:
        return 0.0
    critical = float(stats.t.isf(alpha / 2, df))
    low, high = 0.0, 1.0
    while _power(high, critical, df) < power:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _power(middle, critical, df) < power else (low, middle)
    return high * error


def seeds_needed(
    difference: float,
    variance: CrossedVariance,
    num_problems: float,
    alpha: float = 0.05,
    power: float = 0.8,
    most: int = 200,
) -> int | None:
    """Seeds per arm with which a paired t test finds `difference`; None where `most` seeds would not.

    More seeds cannot average out the choice of test problems: below that floor only more problems help.
    Uses S - 1 degrees of freedom, which is cautious where problems carry most of the variance.
    """
    for num_seeds in range(2, most + 1):
        error = math.sqrt(variance.of_mean(num_seeds, num_problems))
        critical = float(stats.t.isf(alpha / 2, num_seeds - 1))
        if error == 0 or _power(abs(difference) / error, critical, num_seeds - 1) >= power:
            return num_seeds
    return None


def anova(scores: ArrayLike, factors: Sequence[str]) -> list[Effect]:
    """Main effects and interactions of a complete grid, seeds as blocks.

    `scores` has one axis per factor (its levels) and the seeds last, each of length at least 2. Seeds share random
    numbers across arms, so their own effect is removed; the error is all that varies with the seed and a factor,
    with (cells - 1)(S - 1) degrees of freedom (randomised complete blocks, Fisher 1935).
    """
    values = np.asarray(scores, dtype=float)
    if values.ndim != len(factors) + 1 or min(values.shape) < 2:
        raise ValueError(f"scores must have an axis of at least 2 per factor and one of seeds, got {values.shape}")
    num_seeds, num_cells = values.shape[-1], values[..., 0].size
    grand = values.mean()
    cell_means = values.mean(axis=-1)
    seed_means = values.reshape(-1, num_seeds).mean(axis=0)
    residual = values - cell_means[..., None] - seed_means + grand
    error, error_df = float((residual**2).sum()), (num_cells - 1) * (num_seeds - 1)
    axes = range(len(factors))
    subsets = [subset for size in range(1, len(factors) + 1) for subset in itertools.combinations(axes, size)]
    effects = []
    for subset in subsets:
        squares = num_seeds * float((_interaction(cell_means, subset) ** 2).sum())
        df = math.prod(values.shape[axis] - 1 for axis in subset)
        effects.append(_effect(tuple(factors[a] for a in subset), squares, df, error, error_df, values.size))
    adjusted = holm([effect.p for effect in effects])
    return [replace(effect, p_adjusted=p) for effect, p in zip(effects, adjusted, strict=True)]


def _effect(factors: tuple[str, ...], squares: float, df: int, error: float, error_df: int, size: int) -> Effect:
    mean_error = error / error_df
    if mean_error == 0:
        f = math.inf if squares > 0 else math.nan
    else:
        f = squares / df / mean_error
    p = math.nan if math.isnan(f) else float(stats.f.sf(f, df, error_df))
    unbiased = squares - df * mean_error
    whole = squares + (size - df) * mean_error
    return Effect(factors, squares, df, f, p, p, max(unbiased / whole, 0.0) if whole > 0 else 0.0)


def _interaction(cell_means: Floats, subset: tuple[int, ...]) -> Floats:
    """The effect of exactly these factors in every cell, by inclusion and exclusion of marginal means."""
    total = np.zeros_like(cell_means)
    for size in range(len(subset) + 1):
        for kept in itertools.combinations(subset, size):
            others = tuple(axis for axis in range(cell_means.ndim) if axis not in kept)
            marginal = cell_means.mean(axis=others, keepdims=True) if others else cell_means
            total = total + (-1) ** (len(subset) - size) * marginal
    return total


def _mean_squares(scores: Floats) -> tuple[float, float, float]:
    num_seeds, num_problems = scores.shape
    grand = scores.mean()
    seeds, problems = scores.mean(axis=1, keepdims=True), scores.mean(axis=0, keepdims=True)
    rest = scores - seeds - problems + grand
    return (
        _tidy(num_problems * ((seeds - grand) ** 2).sum() / (num_seeds - 1)),
        _tidy(num_seeds * ((problems - grand) ** 2).sum() / (num_problems - 1)),
        _tidy((rest**2).sum() / ((num_seeds - 1) * (num_problems - 1))),
    )


def _tidy(mean_square: float) -> float:
    """Rounding residue as 0: accuracies are fractions, so a true mean square is far above 1e-20."""
    return float(mean_square) if mean_square > 1e-20 else 0.0


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    return float(optimize.root_scalar(function, bracket=(low, high), method="brentq").root)


def _times_drawn(size: int, resamples: int, rng: Generator) -> Floats:
    """How often each of `size` items is drawn in `size` draws with replacement, one row per resample."""
    drawn = rng.integers(size, size=(resamples, size)) + size * np.arange(resamples)[:, None]
    return np.bincount(drawn.ravel(), minlength=resamples * size).reshape(resamples, size).astype(float)


def _t_interval(estimate: float, error: float, df: float, level: float) -> Interval:
    half = float(stats.t.isf((1 - level) / 2, df)) * error
    return Interval(estimate, estimate - half, estimate + half, error, df)


def _percentiles(estimate: float, means: Floats, level: float) -> Interval:
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(estimate, float(low), float(high))


def _power(standardised: float, critical: float, df: float) -> float:
    """Chance that a t statistic with non-centrality `standardised` leaves [-critical, critical]."""
    return float(stats.nct.sf(critical, df, standardised) + stats.nct.cdf(-critical, df, standardised))
