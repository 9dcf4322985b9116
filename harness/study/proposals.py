"""Where the next arm of a search comes from: Optuna's distributions, samplers and pruners, and the untried points."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler

from harness.spec.study import Dimension, Search, SearchPlan

MAX_LISTED = 100_000  # points of a space that are listed to find an untried one


def distribution(dimension: Dimension) -> BaseDistribution:
    """Optuna's description of a dimension."""
    if dimension.choices is not None:
        return CategoricalDistribution(dimension.choices)
    assert dimension.low is not None and dimension.high is not None
    if dimension.whole:
        return IntDistribution(int(dimension.low), int(dimension.high), dimension.log, int(dimension.step or 1))
    return FloatDistribution(float(dimension.low), float(dimension.high), dimension.log, dimension.step)


def new_sampler(search: Search, seed: int) -> BaseSampler:
    match search.sampler:
        case "tpe":
            return TPESampler(n_startup_trials=search.startup, seed=seed)
        case "gp":
            return GPSampler(n_startup_trials=search.startup, seed=seed)
        case "nsga2":
            return NSGAIISampler(population_size=search.population, seed=seed)
        case "random":
            return RandomSampler(seed)


def new_pruner(plan: SearchPlan) -> BasePruner:
    """The pruner of a search; its steps are training steps, counted on from one seed of an arm to the next."""
    spec = plan.base.spec
    match plan.search.pruner:
        case "none":
            return NopPruner()
        case "median":
            return MedianPruner(n_startup_trials=plan.search.startup)
        case "hyperband":
            return HyperbandPruner(spec.evaluation.every, len(plan.seeds) * spec.steps)


def untried(space: Mapping[str, Dimension], tried: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The points of a space that were not tried; one empty point for a space that is too large to list."""
    points = [dimension.points() for dimension in space.values()]
    size = math.prod(math.inf if found is None else len(found) for found in points)
    if size > MAX_LISTED:
        yield {}
        return
    for values in itertools.product(*(found or [] for found in points)):
        point = dict(zip(space, values, strict=True))
        if point not in tried:
            yield point
