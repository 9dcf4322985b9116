"""Tests the factors of a complete grid by an analysis of variance whose random effects are seeds and problems.

The largest p of up to three tests counts, as for comparisons. Their errors are the effect's interaction with the seeds
(Fisher 1935) and, if the scores of single problems or of blocks of them are known, its interaction with those, and the
sum of both minus the residual (the quasi-F of Clark 1973, doi:10.1016/S0022-5371(73)80014-3; Cornfield and Tukey 1956).
Errors are not pooled over effects, and their degrees of freedom are multiplied by Greenhouse and Geisser's (1959)
epsilon, so the spread may differ between arms. For factors of two levels p equals the p of the contrast of arms.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from ..harness.record.study import StudyRecord
from .statistics import ALPHA, Floats
from .trials import ArmSummary, awaits_seeds, share_of_alpha


@dataclass(frozen=True)
class Effect:
    """One row of an analysis of variance; `f` and the effect size come from the test with the larger p.

    `partial_omega_squared` is the effect size, less biased than partial eta squared, at least 0. `p_adjusted` is Holm's
    over the effect's family, NaN before that is known.
    """

    factors: tuple[str, ...]
    df: int
    f: float
    p: float
    partial_omega_squared: float
    p_adjusted: float = math.nan

    @property
    def is_detected(self) -> bool:
        return self.p_adjusted < ALPHA


@dataclass(frozen=True)
class Grid:
    """A full factorial: `labels[i, j, ...]` is the arm at level i of the first factor, j of the second, ...

    `effects` is empty if a cell is missing or fewer than 2 seeds are shared.
    """

    factors: tuple[str, ...]
    levels: tuple[tuple[Any, ...], ...]
    labels: np.ndarray
    effects: Sequence[Effect]

    @property
    def is_any_detected(self) -> bool:
        return any(effect.is_detected for effect in self.effects)


def grid_of(arms: Sequence[ArmSummary], record: StudyRecord) -> Grid | None:
    """The factorial that the arms form, or None: at least 2 factors, or one of at least 3 numeric levels."""
    known = [arm for arm in arms if arm.factors]
    names = list(dict.fromkeys(name for arm in known for name in arm.factors))
    if any(set(arm.factors) != set(names) for arm in known):
        return None
    levels = {name: tuple(dict.fromkeys(arm.factors[name] for arm in known)) for name in names}
    levels = {name: tuple(sorted(found)) if _numeric(found) else found for name, found in levels.items()}
    varied = tuple(name for name in names if len(levels[name]) > 1)
    shape = tuple(len(levels[name]) for name in varied)
    place = {tuple(levels[name].index(arm.factors[name]) for name in varied): arm for arm in known}
    if not varied or (len(varied) == 1 and (shape[0] < 3 or not _numeric(levels[varied[0]]))):
        return None
    if len(place) != len(known) or len(place) != math.prod(shape):
        return None
    labels = np.empty(shape, dtype=object)
    for index, arm in place.items():
        labels[index] = arm.label
    ordered = [place[index] for index in np.ndindex(shape)]
    seeds = sorted(set.intersection(*(set(arm.scores) for arm in ordered)))
    share, effects = share_of_alpha(record, seeds), []
    if len(seeds) > 1 and share > 0 and not awaits_seeds(record, seeds):
        scores = np.array([[arm.scores[seed] for seed in seeds] for arm in ordered]).reshape(*shape, len(seeds))
        found = [rows for arm in ordered if (rows := arm.cells_of(seeds)) is not None]
        cells = np.reshape(found, (*shape, *np.shape(found)[1:])) if len(found) == len(ordered) else None
        fewest = min(arm.num_problems for arm in ordered)
        tested = anova(scores, varied, cells, 1 / fewest if fewest else 0.0)
        effects = [replace(one, p=min(one.p / share, 1.0)) for one in tested]
    return Grid(varied, tuple(levels[name] for name in varied), labels, effects)


def anova(
    scores: ArrayLike, factors: Sequence[str], cells: ArrayLike | None = None, resolution: float = 0.0
) -> list[Effect]:
    """Main effects and interactions of the grid.

    `scores` has one axis per factor (its levels) and the seeds last, each of length at least 2; `cells` has one more
    axis, the problems over which each score is the mean. The error is at least the rounding of scores to multiples of
    `resolution` (resolution^2 / 12 per run); without one an effect without error has no p, as in `t_test`.
    """
    values = np.asarray(scores, dtype=float)
    problems = values[..., None] if cells is None else np.asarray(cells, dtype=float)
    problems = problems.reshape(math.prod(values.shape[:-1]), *problems.shape[-2:])
    sizes, effects = range(1, len(factors) + 1), []
    for subset in itertools.chain.from_iterable(itertools.combinations(range(len(factors)), size) for size in sizes):
        contrasts = np.ones((1, 1))  # orthonormal weights [df, cells] of these factors, averaged over all others
        for axis, size in enumerate(values.shape[:-1]):
            basis = np.linalg.qr(np.column_stack([np.ones(size), np.eye(size)[:, 1:]]))[0].T
            contrasts = np.kron(contrasts, basis[1:] if axis in subset else basis[:1])
        f, p = _test(np.tensordot(contrasts, problems, axes=1), float(np.abs(values).max()), resolution)
        gain = len(contrasts) * (f - 1)
        size = 1.0 if math.isinf(f) else max(gain / (gain + values.size), 0.0)
        effects.append(Effect(tuple(factors[axis] for axis in subset), len(contrasts), f, p, size))
    return effects


def _test(y: Floats, largest: float, resolution: float) -> tuple[float, float]:
    """(F, p) of contrasts [df, seeds, problems] of scores up to `largest`, by the larger p.

    All covariances [df, df] are of one run's score, which is the mean over the problems.
    """
    df, num_seeds, num_problems = y.shape
    grand = y.mean(axis=(1, 2), keepdims=True)
    seeds, problems = y.mean(axis=2, keepdims=True) - grand, y.mean(axis=1, keepdims=True) - grand
    nothing = 1e-24 * largest**2  # floating-point rounding
    mean_square = num_seeds * float((grand**2).sum()) / df
    mean_square = mean_square if mean_square > nothing else 0.0

    def against(error: Floats, parts: Sequence[tuple[Floats, int]]) -> tuple[float, float]:
        """(F, p); `parts` are the covariances in `error` and the degrees of freedom of each."""
        spread = float(np.trace(error)) / df
        has_spread = spread > nothing
        mean_error = max(spread if has_spread else 0.0, resolution**2 / 12)
        if mean_error == 0:
            return (0.0, 1.0) if mean_square == 0 else (math.inf, math.nan)
        between, within = 1.0, float(df_seed)
        if has_spread:  # Satterthwaite (1946), for contrasts that are correlated or differ in spread (Box 1954)
            between = max(np.trace(error) ** 2 / (error**2).sum(), 1.0)
            within = max(np.trace(error) ** 2 / sum((part**2).sum() / count for part, count in parts), 1.0)
        f = mean_square / mean_error
        return f, float(special.fdtrc(between, within, f))

    df_seed = num_seeds - 1
    by_seed = _covariance(seeds, df_seed)
    found = [against(by_seed, [(by_seed, df_seed)])]
    if num_problems > 1:
        count = df_seed * (num_problems - 1)
        rest = _covariance(y - seeds - problems - grand, count) / num_problems
        by_problem = _covariance(problems, num_problems - 1) * num_seeds / num_problems
        found.append(against(by_problem, [(by_problem, num_problems - 1)]))
        by_seed, by_problem = (max(one, rest, key=np.trace) for one in (by_seed, by_problem))
        parts = [(by_seed, df_seed), (by_problem, num_problems - 1), (rest, count)]
        found.append(against(by_seed + by_problem - rest, parts))
    return max(found, key=lambda test: math.inf if math.isnan(test[1]) else test[1])


def _covariance(deviations: Floats, degrees: int) -> Floats:
    """[df, df] from deviations [df, ...]."""
    flat = deviations.reshape(len(deviations), deviations[0].size)
    return flat @ flat.T / degrees


def _numeric(levels: tuple[Any, ...]) -> bool:
    return all(isinstance(level, int | float) and not isinstance(level, bool) for level in levels)
