"""Decides which factors of a complete grid matter: an analysis of variance with seeds as blocks (Fisher 1935)."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from reports.statistics import Floats, holm


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


def anova(scores: ArrayLike, factors: Sequence[str]) -> list[Effect]:
    """Main effects and interactions of the grid.

    `scores` has one axis per factor (its levels) and the seeds last, each of length at least 2. Seeds share random
    numbers across arms, so their own effect is removed. The error is all that varies with the seed and a factor; it
    has (cells - 1)(S - 1) degrees of freedom.
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
    mean_error = error / error_df
    effects = []
    for subset in subsets:
        squares = num_seeds * float((_interaction(cell_means, subset) ** 2).sum())
        df = math.prod(values.shape[axis] - 1 for axis in subset)
        f = squares / df / mean_error if mean_error > 0 else (math.inf if squares > 0 else math.nan)
        p = math.nan if math.isnan(f) else float(stats.f.sf(f, df, error_df))
        whole = squares + (values.size - df) * mean_error
        size = max((squares - df * mean_error) / whole, 0.0) if whole > 0 else 0.0
        effects.append(Effect(tuple(factors[axis] for axis in subset), squares, df, f, p, p, size))
    adjusted = holm([effect.p for effect in effects])
    return [replace(effect, p_adjusted=p) for effect, p in zip(effects, adjusted, strict=True)]


def _interaction(cell_means: Floats, subset: tuple[int, ...]) -> Floats:
    """The effect of exactly these factors in every cell, by inclusion and exclusion of marginal means."""
    total = np.zeros_like(cell_means)
    for size in range(len(subset) + 1):
        for kept in itertools.combinations(subset, size):
            others = tuple(axis for axis in range(cell_means.ndim) if axis not in kept)
            marginal = cell_means.mean(axis=others, keepdims=True) if others else cell_means
            total = total + (-1) ** (len(subset) - size) * marginal
    return total
