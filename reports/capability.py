"""Computes results from many samples of each test problem: pass@k for every k, Cover@tau, and the k at which curves
cross.

pass@k is the unbiased estimate of Chen et al. (2021, arXiv:2107.03374). Cover@tau is the share of problems that a
policy solves with a probability of at least tau (Dragoi et al. 2025, arXiv:2510.08325); its estimate takes the fraction
of right samples for that probability. No estimate from finitely many samples is unbiased, because a step is not a
polynomial; with n samples the bias is of order 1 / n for problems near tau.

"Before training" is the evaluation of `evaluation.test_at_start`, "after training" the final one of every run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..harness.base.words import quoted
from ..harness.record.study import TrialRecord
from . import statistics
from .analysis import Analysis
from .statistics import Floats, Interval
from .trials import blocks_of, families_of

MIN_SAMPLES = 16  # of each problem; fewer make no useful curve
TAUS = (0.1, 0.25, 0.5, 0.75, 0.9)
FEWEST_PROBLEMS = 5  # a smaller difference between two arms does not count as shown


@dataclass(frozen=True)
class Capability:
    """The number of right samples of each test problem, seeds by problems.

    blocks  places of the problems in blocks of whole families (`statistics.blocks`); empty if each is one by itself
    """

    label: str
    seeds: tuple[int, ...]
    counts_SN: NDArray[np.int64]
    num_samples: int
    blocks: Sequence[Sequence[int]] = ()

    def passes(self, k: int) -> Floats:
        """The unbiased pass@k of each problem."""
        return pass_table(self.num_samples)[self.counts_SN, k - 1]

    def pass_at(self, k: int) -> Interval | None:
        return self._interval(self.passes(k))

    def covers(self, tau: float) -> Floats:
        """1 for each problem of which at least the fraction tau of the samples is right, else 0."""
        return (self.counts_SN >= tau * self.num_samples - 1e-9).astype(float)

    def cover_at(self, tau: float) -> Interval | None:
        return self._interval(self.covers(tau))

    def _interval(self, scores_SN: Floats) -> Interval | None:
        return statistics.fraction_interval(self.in_blocks(scores_SN), scores_SN.shape[1])

    def in_blocks(self, scores_SN: Floats) -> Floats:
        return statistics.in_blocks(scores_SN, self.blocks) if self.blocks else scores_SN


@dataclass(frozen=True)
class Crossover:
    """The smallest k at which pass@k of `other` is above `leader`'s, which leads at smaller k.

    k          such a k in the means; None if there is none up to `most`, or if the two agree everywhere
    low, high  limits of k; None if the test shows no lead on that side, so that k may lie outside the measured range
    """

    leader: str
    other: str
    most: int
    k: int | None = None
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True)
class Capabilities:
    """The curves of each arm after training, and of the starts, whose labels name their arms."""

    after: Mapping[str, Capability]
    before: Sequence[Capability]
    crossovers: Sequence[Crossover]


@lru_cache(maxsize=4)
def pass_table(num_samples: int) -> Floats:
    """[c, k - 1]: unbiased pass@k of a problem with c of n samples right, 1 - C(n - c, k) / C(n, k).

    The ratio is the running product of (n - c - i) / (n - i), in which no number is large.
    """
    right, drawn = np.arange(num_samples + 1)[:, None], np.arange(num_samples)
    wrong_left = np.maximum(num_samples - right - drawn, 0) / (num_samples - drawn)
    return np.asarray(1 - np.cumprod(wrong_left, axis=1), dtype=np.float64)


def capabilities(analysis: Analysis) -> Capabilities | None:
    """The capabilities of a study; None unless an arm has enough samples of its test problems in all of its seeds."""
    after, starts, families = {}, [], families_of(analysis.record.trials)
    for arm in analysis.finished_arms:
        trials = [analysis.usable[arm.label, seed] for seed in arm.scores]
        if (found := _capability(arm.label, trials, "test", families)) is not None:
            after[arm.label] = found
        if (found := _capability(arm.label, trials, "start", families)) is not None:
            starts.append(found)
    if not after:
        return None
    pairs = [(after[b.label], replace(b, label=f"start of {b.label}")) for b in starts if b.label in after]
    if analysis.baseline is not None and (base := after.get(analysis.baseline.label)) is not None:
        pairs += [(one, base) for one in after.values() if one is not base]
    crossings = [found for a, b in pairs if (found := crossover(a, b)) is not None]
    same: dict[tuple, list[Capability]] = {}  # arms that start from one policy with equal noise give one curve
    for one in starts:
        same.setdefault((one.seeds, one.num_samples, one.counts_SN.tobytes()), []).append(one)
    before = [replace(ones[0], label=quoted([one.label for one in ones])) for ones in same.values()]
    return Capabilities(after, before, crossings)


def crossover(one: Capability, two: Capability) -> Crossover | None:
    """The crossing of two policies' pass@k, over their shared seeds; None without one, or with different problems.

    Its limits invert a test: k is above the last k at which the leader is shown to be ahead, and at most the first k at
    which the other is. At a true crossing the 95 % interval of the paired difference excludes 0 in 5 % of studies.
    """
    seeds = sorted(set(one.seeds) & set(two.seeds))
    if not seeds or one.counts_SN.shape[1] != two.counts_SN.shape[1]:
        return None
    rows = [[each.seeds.index(seed) for seed in seeds] for each in (one, two)]
    ones, twos = replace(one, counts_SN=one.counts_SN[rows[0]]), replace(two, counts_SN=two.counts_SN[rows[1]])
    most = min(one.num_samples, two.num_samples)
    ks = range(1, most + 1)
    means = np.array([(ones.passes(k) - twos.passes(k)).mean() for k in ks])
    means[np.abs(means) < 1e-12] = 0.0
    signs = np.sign(means)
    if not signs.any():
        return Crossover(one.label, two.label, most)
    led = signs[signs != 0][0]
    leader, other = (one, two) if led == 1 else (two, one)
    turned = np.flatnonzero(signs == -led)
    if not turned.size:
        return Crossover(leader.label, other.label, most)
    at = int(turned[0])

    def shown(place: int) -> float:
        """The sign of the difference if its interval shows one, else 0."""
        cells = ones.passes(ks[place]) - twos.passes(ks[place])
        interval = statistics.paired_interval(ones.in_blocks(cells))
        few = abs(cells.mean()) * cells.shape[1] < FEWEST_PROBLEMS
        return 0.0 if interval is None or few or interval.low <= 0 <= interval.high else signs[place]

    low = next((ks[place] + 1 for place in reversed(range(at)) if shown(place) == led), None)
    high = next((ks[place] for place in range(at, most) if shown(place) == -led), None)
    return Crossover(leader.label, other.label, most, ks[at], low, high)


def curves_of_counts(counts: Sequence[int], num_samples: int) -> dict[str, dict[str, list[float]]]:
    """pass@k of every k and Cover@tau of a single policy, each as estimate, low, high over the problems; by name.

    Empty with too few samples or problems.
    """
    if num_samples < MIN_SAMPLES or len(counts) < 2:
        return {}
    one = Capability("", (0,), np.array([counts], dtype=np.int64), num_samples)
    passes = {str(k): one.pass_at(k) for k in range(1, num_samples + 1)}
    covers = {f"{tau:g}": one.cover_at(tau) for tau in TAUS}
    return {
        name: {key: [found.estimate, found.low, found.high] for key, found in curve.items() if found is not None}
        for name, curve in (("pass_at_k", passes), ("cover_at_tau", covers))
    }


def table_sizes(num_samples: int) -> list[int]:
    """The k of a table: powers of 4, and the number of samples itself."""
    return [*(4**j for j in range(num_samples.bit_length()) if 4**j < num_samples), num_samples]


def _capability(label: str, trials: Sequence[TrialRecord], area: str, families: Mapping[str, str]) -> Capability | None:
    fractions = [trial.start_per_problem if area == "start" else trial.per_problem for trial in trials]
    sizes = {series[-1][1] if (series := trial.history.get(f"{area}/num_samples")) else 0 for trial in trials}
    if any(len(trial.history.get(f"{area}/num_samples", ())) > 1 for trial in trials):
        return None  # a mean over several policies has no counts
    problems = {frozenset(one) for one in fractions}
    if len(sizes) != 1 or len(problems) != 1 or (size := int(sizes.pop())) < MIN_SAMPLES or len(fractions[0]) < 2:
        return None
    order = sorted(fractions[0])
    counts = [[round(one[problem] * size) for problem in order] for one in fractions]
    seeds, blocks = tuple(trial.seed for trial in trials), blocks_of(order, families)
    return Capability(label, seeds, np.array(counts, dtype=np.int64), size, blocks)
