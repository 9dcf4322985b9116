"""Computes the certainty of a study: intervals, paired differences and tests for few seeds.

Notation: S seeds, N test problems, K samples of each problem. `scores_S` holds one number per seed. `scores_SN` holds,
per seed and problem, the fraction of the K samples that were right. The only randomness is the
`numpy.random.Generator` that is passed in.

Choice of interval. Seeds and problems are crossed random effects: every seed is scored on the same problems.
`SIMULATED_COVERAGE` says how often each nominal 95 % interval contains the accuracy of an arm on new seeds and new
problems of the same kind (512 problems, 4 samples each, accuracy 71 %, seeds with a standard deviation of 2.5 points;
4000 simulated studies; `tests/test_statistics.py` repeats them with fewer).

The percentile bootstrap cannot work with 3 seeds: its interval ends at the lowest and the highest seed, which enclose
the truth in 1 - 2 / 2^3 = 75 % of studies. The Student t interval over seeds covers 95 % for these test problems
(normal seeds, measured 95.1, 94.8 and 94.9 %), but not for new problems, which all seeds share. Reports therefore state
the widest of the two-way and the Student t intervals. Where the scores of single problems are not known, they state
Student's over seeds. The bootstrap is shown in addition. The same holds for paired differences.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special  # not stats, which takes as long to import as both

Floats = NDArray[np.float64]

LEVEL = 0.95
ALPHA = 0.05
POWER = 0.8
RARE = 5

# Method -> seeds -> percent of the simulations described above. P(higher) is the probability of improvement of an arm
# whose normal seeds are 0, 1 or 2 standard deviations higher.
SIMULATED_COVERAGE = {
    "Stated: the wider of two-way t and Student t": {3: 95.6, 5: 94.5, 10: 95.5},
    "Two-way t over seeds and problems": {3: 93.2, 5: 94.4, 10: 95.5},
    "Student t over seeds": {3: 93.4, 5: 90.8, 10: 85.5},
    "Percentile bootstrap over seeds": {3: 70.6, 5: 75.1, 10: 77.1},
    "Stated for a difference: the wider of the two, paired": {3: 96.9, 5: 94.7, 10: 94.8},
    "Stated for P(higher): Newcombe": {3: 93.4, 5: 95.2, 10: 95.8},
}


@dataclass(frozen=True)
class Interval:
    """An estimate with its two-sided interval.

    `error` is the standard error and `df` its degrees of freedom; NaN for a method without them. `share` is that part
    of ALPHA which its test may spend, and of 1 - LEVEL outside of it: see `any_time_share`.
    """

    estimate: float
    low: float
    high: float
    error: float = math.nan
    df: float = math.nan
    share: float = 1.0


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


def any_time_share(num_seeds: int) -> float:
    """The part of ALPHA for a reading after that many seeds, if seeds are added until a reader has seen enough.

    1 / (S (S - 1) / 2) for S seeds, none before 3: the parts of 3, 4, 5, ... seeds add up to 1. Whatever stops the
    seeds, a false statement at some number of them is then as likely as ALPHA at most (Boole's inequality).
    """
    return 1 / math.comb(num_seeds, 2) if num_seeds > 2 else 0.0


def any_time_width(num_seeds: int) -> float:
    """Width of Student's interval with that share, over its width with all of ALPHA; infinite below 3 seeds."""
    widths = (_t_quantile(ALPHA * share / 2, num_seeds - 1) for share in (any_time_share(num_seeds), 1.0))
    return next(widths) / next(widths)


def blocks(families_N: Sequence[Hashable]) -> list[list[int]]:
    """The places of the problems in blocks, which are independent if families are; each problem alone if all differ.

    Families are joined up to the size of the largest one (first fit, the largest first), so that no block weighs much
    more than another. A family with more than half of the problems leaves none to compare it with: one block.
    """
    members: dict[Hashable, list[int]] = {}
    for place, family in enumerate(families_N):
        members.setdefault(family, []).append(place)
    families = sorted(members.values(), key=len, reverse=True)
    most = max(map(len, families), default=0)
    if 2 * most > len(families_N):
        return [list(range(len(families_N)))]
    full: list[list[int]] = []
    open_: list[list[int]] = []
    for family in families:
        block = next((one for one in open_ if len(one) + len(family) <= most), [])
        if not block:
            open_.append(block)
        block += family
        if len(block) == most:
            open_.remove(block)
            full.append(block)
    return sorted(full + open_)


def in_blocks(scores_SN: ArrayLike, blocks: Sequence[Sequence[int]]) -> Floats:
    """[S, B]: the scores with blocks for problems, and with the same mean of each seed.

    A block that holds the share w of the problems has the score s + B w (b - s), where s is the mean over all problems
    and b that over the block: the linear form of a ratio estimate for clusters of unequal size (Cochran 1977, chapter
    9A). For equal sizes it is b, for single problems the score itself.
    """
    scores = np.asarray(scores_SN, dtype=float)
    if len(blocks) == scores.shape[1]:
        return scores
    mean_S, share = scores.mean(axis=1), len(blocks) / scores.shape[1]
    columns = [mean_S + share * len(one) * (scores[:, one].mean(axis=1) - mean_S) for one in blocks]
    return np.stack(columns, axis=1)


def t_interval(scores_S: ArrayLike, share: float = 1.0) -> Interval | None:
    """Student's interval for the mean over seeds, given these test problems; None with fewer than 2 seeds or no share.

    Exact for normally distributed seeds (Student 1908). It says nothing about other problems: all seeds share these.
    """
    values = np.asarray(scores_S, dtype=float)
    if values.size < 2 or share == 0:
        return None
    error = float(values.std(ddof=1)) / math.sqrt(values.size)
    return _t_interval(float(values.mean()), error, values.size - 1, share)


def cautious_interval(scores_SN: ArrayLike, share: float = 1.0) -> Interval | None:
    """The widest of `cautious_intervals`: what reports state; None with fewer than 2 seeds, or no share.

    Few seeds give two rough estimates of spread. With the wider interval a statement that includes new problems is
    never more certain than one about these problems alone, and coverage holds from 2 seeds on.
    """
    return widest(cautious_intervals(scores_SN, share=share))


def widest(intervals: Sequence[Interval]) -> Interval | None:
    return max(intervals, key=lambda interval: interval.high - interval.low, default=None)


def cautious_intervals(*groups: ArrayLike, share: float = 1.0) -> list[Interval]:
    """`t_interval` over the seeds, the two-way interval, and Student's over the problems given these seeds: of a mean
    [S, N], or of a sum of groups of runs that share problems and no seeds.

    Two-way random effects (Cornfield and Tukey 1956): the variance of the mean is
    (MS_seed + MS_problem - MS_rest) / (S N), its degrees of freedom are Satterthwaite's (1946). A negative variance
    component is set to 0, which can only widen the interval. Variances over the seeds of several groups are added, with
    Satterthwaite's degrees of freedom (Welch 1947); problems are the columns of the sum, which all groups share. The
    third is the widest only with few blocks of problems, whose spread is as rough an estimate as over few seeds.
    A single block leaves the first; there are none with fewer than 2 seeds in a group.
    """
    each = [np.asarray(one, dtype=float) for one in groups]
    own = [one for scores in each if (one := t_interval(scores.mean(axis=1), share)) is not None]
    if len(own) < len(each):
        return []
    columns = np.sum([scores.mean(axis=0) for scores in each], axis=0)
    mean, seeds = float(columns.mean()), [(one.error**2, one.df) for one in own]
    student = own[0] if len(own) == 1 else _t_interval(mean, sum(v for v, _ in seeds) ** 0.5, _df(seeds), share)
    over_problems = t_interval(columns, share)
    if over_problems is None:
        return [student]
    rests = [(_mean_squares(one)[1] / one.size, (len(one) - 1) * (one.shape[1] - 1)) for one in each]
    seeds = [(max(v, rest), df) for (v, df), (rest, _) in zip(seeds, rests, strict=True)]
    rest = sum(v for v, _ in rests)
    problems = (max(over_problems.error**2, rest), over_problems.df)
    total = sum(v for v, _ in seeds) + problems[0] - rest
    df = max(total**2 / sum(v**2 / df for v, df in (*seeds, problems, *rests)), 1.0) if total > 1e-20 else own[0].df
    return [student, _t_interval(mean, math.sqrt(total) if total > 1e-20 else 0.0, df, share), over_problems]


def _df(variances: Sequence[tuple[float, float]]) -> float:
    """Satterthwaite's degrees of freedom of a sum of variances with these; the least of them without any."""
    total = sum(v for v, _ in variances)
    return total**2 / sum(v**2 / df for v, df in variances) if total > 0 else min(df for _, df in variances)


def paired_interval(scores_SN: ArrayLike) -> Interval | None:
    """The interval over seeds and problems, or over the problems alone if there is a single seed; None without them."""
    scores = np.asarray(scores_SN, dtype=float)
    return t_interval(scores[0]) if len(scores) == 1 else cautious_interval(scores)


def wilson_interval(fraction: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a proportion observed on `count` problems (Wilson 1927, eq. for the score interval).

    For a mean of values in [0, 1] that are not all 0 or 1 it is wider than needed, never narrower. SciPy's takes whole
    numbers of successes only.
    """
    return _wilson(fraction, count, NormalDist().inv_cdf(0.975))


def fraction_interval(scores_SN: ArrayLike, num_problems: int = 0) -> Interval | None:
    """The same for a mean of fractions that may be close to 0 or 1: it stays between them and holds there.

    Wilson's score interval (1927), with the effective number of problems, m (1 - m) / error^2, for their number and
    Student's t for z, as Korn and Graubard (1998) adapt another interval to clustered samples. Where fewer than
    `RARE` problems are wrong, or right, the effective number is not above their number: the interval is then wide.
    With blocks for problems, `num_problems` of them in all, fewer than `RARE` of the effective number count as rare.
    """
    scores = np.asarray(scores_SN, dtype=float)
    interval = paired_interval(scores)
    if interval is None:
        return None
    mean, columns, t = interval.estimate, scores.shape[1], _t_quantile(0.025, interval.df)
    count = mean * (1 - mean) / interval.error**2 if interval.error > 1e-9 else float(columns)
    if min(count, num_problems or columns) * min(mean, 1 - mean) < RARE:
        count = min(count, columns)
    return Interval(mean, *_wilson(mean, count, t), interval.error, interval.df)


def crossed_variance(*groups: ArrayLike) -> CrossedVariance:
    """Variance components from at least 2 seeds and 2 problems, by the method of moments; of a sum of groups of runs
    that share problems and no seeds, if there are several."""
    each = [np.asarray(scores, dtype=float) for scores in groups]
    squares = [_mean_squares(scores) for scores in each]
    columns = np.sum([scores.mean(axis=0) for scores in each], axis=0).var(ddof=1)
    noise = sum(rest / len(scores) for (_, rest), scores in zip(squares, each, strict=True))
    seed = sum(max(seed - rest, 0.0) for seed, rest in squares) / each[0].shape[1]
    return CrossedVariance(seed, max(float(columns) - noise, 0.0), sum(rest for _, rest in squares))


def at_edges(interval: Interval, num_problems: int) -> Interval:
    """The interval of a fraction of that many problems, at least as wide as Wilson's (1927) where fewer than `RARE` are
    right, or wrong, or no score differs. No limit falls when more problems are right: beyond, the upper one is not
    below the limit for `RARE` right problems, nor the lower one above the limit for `RARE` wrong ones."""
    mean, edge = interval.estimate, min(RARE / num_problems, 0.25)
    quantile = NormalDist().inv_cdf(1 - (1 - LEVEL) * interval.share / 2)
    if min(mean, 1 - mean) < edge - 1e-12 or not interval.error > 0:
        low, high = _wilson(mean, num_problems, quantile)
    elif edge < 0.25:
        low, high = _wilson(1 - edge, num_problems, quantile)[0], _wilson(edge, num_problems, quantile)[1]
    else:
        return interval
    return replace(interval, low=min(interval.low, low), high=max(interval.high, high))


def sparse_interval(estimate: float, num_problems: int, num_others: int, share: float, scale: float = 1.0) -> Interval:
    """The interval of a difference of arms that score alike on all problems but `num_others`, fewer than `RARE`.

    Seeds and problems that agree show no spread, which is no proof that others would: z^2 problems are added that
    differ (as Agresti and Min 2005 add one), so that none of n leaves Wilson's limit z^2 / (n + z^2).
    """
    added = NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2
    error = scale * math.sqrt(num_others + added) / (num_problems + added)
    return _t_interval(estimate, error, max(num_problems - 1, 1), share)


def num_others(scores: Floats) -> int:
    """The problems (columns) that do not have the scores which most of them have."""
    return scores.shape[1] - int(np.unique(scores, axis=1, return_counts=True)[1].max())


def in_clusters(scores_S: Sequence[float]) -> bool:
    """Whether fractions of seeds lie in two clusters, of which one collapsed or was lucky: the largest gap is at least
    10 points and twice the rest of their range."""
    gaps = np.sort(np.diff(np.sort(scores_S)))
    return len(gaps) > 1 and bool(gaps[-1] >= max(0.1, 2 * gaps[:-1].sum()))


def bootstrap_interval(scores_S: ArrayLike, rng: Generator | int, resamples: int = 10_000) -> Interval | None:
    """Percentile bootstrap over seeds (Efron 1979); None with fewer than 2 seeds.

    Too narrow for few seeds, whatever the number of resamples: see the table at the top.
    """
    values = np.asarray(scores_S, dtype=float)
    if values.size < 2:
        return None
    means = np.random.default_rng(rng).choice(values, size=(resamples, values.size)).mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(values.mean()), float(low), float(high))


def t_test(difference: Interval, resolution: float = 0.0) -> float:
    """Two-sided p-value of a difference of 0, from the interval's error, degrees of freedom and share; NaN without.

    Scores that are counts of problems stand on a grid: equal differences in every seed show no spread, and yet are no
    proof. The error therefore counts at least as much as rounding two scores to multiples of `resolution`
    (resolution^2 / 6 a seed). Without a resolution a difference without spread has no p-value.
    """
    if math.isnan(difference.error):
        return math.nan
    if difference.estimate == difference.error == 0:
        return 1.0
    error = max(difference.error, resolution / math.sqrt(6 * (difference.df + 1)))
    if error <= 1e-12 * abs(difference.estimate):  # no spread but the computer's own rounding
        return math.nan
    return min(float(2 * special.stdtr(difference.df, -abs(difference.estimate) / error)) / difference.share, 1.0)


def region_test(tests: Sequence[Interval], low: float, high: float, resolution: float = 0.0) -> tuple[float, float]:
    """(p of a mean that is not between `low` and `high`, one of them finite, p of one that is): a small one shows the
    opposite.

    A mean is shown to be above (below) an end by the largest p of `tests`, intervals with one estimate, in that
    direction, so that p is below 0.05 where the widest of them lies on that side of it. Between two ends takes both
    (two one-sided tests, Schuirmann 1987; at half of ALPHA each, as everywhere here). NaN as for `t_test`.
    """

    def shown(end: float, sign: float) -> float:
        shifted = [replace(test, estimate=sign * (test.estimate - end)) for test in tests]
        found = [t_test(one, resolution) for one in shifted]
        pairs = zip(found, shifted, strict=True)
        return float(np.max([p if math.isnan(p) or one.estimate > 0 else 1.0 for p, one in pairs]))

    if not tests:
        return math.nan, math.nan
    ends = [(end, sign) for end, sign in ((low, 1), (high, -1)) if math.isfinite(end)]
    return float(np.max([shown(*end) for end in ends])), float(np.min([shown(end, -sign) for end, sign in ends]))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values that keep the chance of any false discovery below alpha (Holm 1979). NaN stays NaN."""
    adjusted = [math.nan] * len(p_values)
    ordered = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    largest = 0.0
    for rank, (p, index) in enumerate(ordered):
        largest = max(largest, min(1.0, (len(ordered) - rank) * p))
        adjusted[index] = largest
    return adjusted


def flip_tests(differences_SN: Floats) -> tuple[Floats, Floats, Floats]:
    """[N] p of no difference by flipping the signs of each column (Fisher 1935; drawn beyond 13 seeds), p after Holm's
    correction over the columns that are not all zero (no flip changes which), and the number of seeds at which the
    latter would fall below ALPHA: of a normal score that grows with the root of seeds, and for the number of flips."""
    seeds = len(differences_SN)
    if seeds <= 13:
        flips = np.arange(2 ** (seeds - 1))[:, None] >> np.arange(seeds)
    else:
        flips = np.random.default_rng(0).integers(2, size=(4096, seeds))
        flips[0] = 0  # the signs that were seen are one of the ways, so that no p is 0 (Phipson and Smyth 2010)
    totals, found = np.abs((1 - 2 * (flips & 1)) @ differences_SN), np.abs(differences_SN.sum(axis=0))
    p, tested = (totals >= found - 1e-9).mean(axis=0), differences_SN.any(axis=0)
    adjusted, level = np.ones_like(p), ALPHA / max(tested.sum(), 1)
    adjusted[tested] = holm(p[tested].tolist())
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = found / np.sqrt((differences_SN**2).sum(axis=0))
        needed = np.ceil(np.maximum(seeds * (special.ndtri(level / 2) / scores) ** 2, 1 - np.log2(level)))
    return p, adjusted, np.where(tested & (found > 1e-9), needed, np.inf)


def probability_of_improvement(scores_S: ArrayLike, baseline_S: ArrayLike) -> float:
    """Chance that a run of the arm beats a run of the baseline, ties counting half (Agarwal et al. 2021, eq. 1)."""
    arm, baseline = np.asarray(scores_S, dtype=float)[:, None], np.asarray(baseline_S, dtype=float)[None, :]
    return float(np.mean(np.heaviside(arm - baseline, 0.5)))


def improvement_interval(probability: float, num_seeds: int, num_baseline: int) -> Interval:
    """The interval of a probability of improvement between arms with that many seeds (Newcombe 2006, method 5).

    At its limits the squared distance to the estimate is z^2 times the variance of Hanley and McNeil (1982) at the
    limit itself, with both counts replaced by their mean (doi:10.1002/sim.2324). Unlike the bootstrap it does not
    shrink to a point if the arms do not overlap. It treats the arms as independent, which is cautious for arms that
    share seeds.
    """
    z_squared, runs = float(special.chdtri(1, 1 - LEVEL)), (num_seeds + num_baseline) / 2 - 1

    def excess(limit: float) -> float:
        spread = 1 + runs * (1 - limit) / (2 - limit) + runs * limit / (1 + limit)
        return (limit - probability) ** 2 - z_squared * limit * (1 - limit) * spread / (num_seeds * num_baseline)

    edge = 1e-9  # the equation has another root at an estimate of 0 or 1
    low, high = _root(excess, 0.0, min(probability, 1 - edge)), _root(excess, max(probability, edge), 1.0)
    return Interval(probability, low, high)


def minimum_detectable_difference(error: float, df: float, alpha: float = ALPHA) -> float:
    """The true difference that a two-sided t test at `alpha` finds, with its sign, with probability `POWER`.

    From the non-central t distribution; as uncertain as `error` itself, so a guide and no guarantee.
    """
    critical = _t_quantile(alpha / 2, df)

    def excess(standardised: float) -> float:
        return _power(standardised, critical, df) - POWER

    high = critical
    while excess(high) < 0:
        high += critical
    return _root(excess, 0.0, high) * error


def seeds_needed(
    difference: float,
    variance: CrossedVariance,
    num_problems: int,
    alpha: float = ALPHA,
    share: Callable[[int], float] = lambda _: 1.0,
) -> int | None:
    """Seeds per arm with which a paired t test finds `difference` with probability `POWER`; None if 200 are too few.

    More seeds cannot average out the choice of test problems: below that floor only more problems help.
    Uses S - 1 degrees of freedom, which is cautious if problems carry most of the variance. S seeds may spend their
    `share` of alpha.
    """
    for num_seeds in range(2, 201):
        error = math.sqrt(variance.of_mean(num_seeds, num_problems))
        critical = _t_quantile(alpha * share(num_seeds) / 2, num_seeds - 1)
        if share(num_seeds) and (error == 0 or _power(abs(difference) / error, critical, num_seeds - 1) >= POWER):
            return num_seeds
    return None


def _mean_squares(scores: Floats) -> tuple[float, float]:
    """Of the seeds, and of what neither seeds nor problems explain."""
    num_seeds, num_problems = scores.shape
    grand = scores.mean()
    seeds, problems = scores.mean(axis=1, keepdims=True), scores.mean(axis=0)
    rest = scores - seeds - problems + grand
    by_seed = num_problems * ((seeds - grand) ** 2).sum() / (num_seeds - 1)
    by_rest = (rest**2).sum() / ((num_seeds - 1) * (num_problems - 1))
    # accuracies are fractions, so a true mean square is far above 1e-20: less is the residue of rounding
    by_seed, by_rest = (float(one) if one > 1e-20 else 0.0 for one in (by_seed, by_rest))
    return by_seed, by_rest


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    return float(optimize.root_scalar(function, bracket=(low, high)).root)


def _wilson(fraction: float, count: float, quantile: float) -> tuple[float, float]:
    scale = 1 + quantile**2 / count
    centre = (fraction + quantile**2 / (2 * count)) / scale
    half = quantile * math.sqrt(fraction * (1 - fraction) / count + quantile**2 / (4 * count**2)) / scale
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _t_interval(estimate: float, error: float, df: float, share: float) -> Interval:
    half = _t_quantile((1 - LEVEL) * share / 2, df) * error
    return Interval(estimate, estimate - half, estimate + half, error, df, share)


def _t_quantile(tail: float, df: float) -> float:
    """The value that Student's t exceeds with probability `tail`. (scipy.stats takes milliseconds per call.)"""
    return -float(special.stdtrit(df, tail))


def _power(standardised: float, critical: float, df: float) -> float:
    """Chance that a t statistic with this non-centrality is above `critical`: a finding with the true sign.

    scipy has NaN for some chances that are 1.
    """
    missed = float(special.nctdtr(df, standardised, critical))
    return 1.0 if math.isnan(missed) else 1 - missed
