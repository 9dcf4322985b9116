"""Decides the number of seeds of a study from its first seeds, by Stein's two-stage procedure.

The first n0 seeds give the standard deviation s of what an interval is for: of the difference of each arm to the
baseline on the same seeds, or of the only arm. It asks for n = max(n0, ceil((t s / h)^2)) seeds, where t is the 97.5 %
point of Student's t with n0 - 1 degrees of freedom. For normal seeds the mean over all n, with the *first* s, then has
exactly Student's t distribution with n0 - 1 degrees of freedom, and mean +- t s / sqrt(n) ends within h of the mean
(Stein 1945, doi:10.1214/aoms/1177731088): a normal sample's mean does not depend on its variance. For the same reason
any number that follows from the first deviations alone will do. Here it is the largest that a comparison asks for, and
`at_most` at most: the mean of normal vectors does not depend on their covariance matrix, so the interval and the p of
every comparison stay exact (Healy 1956, Ann. Math. Statist. 27:687-702). Where `at_most` binds, the width is
not kept. Nor is it where all seeds turn out more spread than the first: reports then use that spread.

The score is that which a report compares: the study's metric on the test split if every trial has it. A comparison is
judged by the first seeds that both arms completed; one with fewer than two of them asks for nothing. Invalid trials
are not replaced. Control arms ask for no seeds.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from ..settings.study import StudySpec, TwoStage
from .plan import Key

LEVEL = 0.95


def on_test_split(metric: str) -> str:
    """The metric of the test split that a report compares instead of one of the validation split."""
    return metric.replace("validation/", "test/", 1)


def seeds_asked(deviation: float, num_seeds: int, half_width: float) -> float:
    """The unrounded number of seeds for an interval of `half_width`, from the deviation over `num_seeds` seeds."""
    from scipy import special  # here: a queue is opened often, and asks this once

    return (float(special.stdtrit(num_seeds - 1, (1 + LEVEL) / 2)) * deviation / half_width) ** 2


def decide(study: StudySpec, values: Mapping[Key, Mapping[str, float]]) -> dict[str, Any]:
    """The decision on the seeds of a study, from the values of its complete first trials.

    metric       what was judged
    decided      when, UTC
    comparisons  arm, seeds that were used, deviation of their differences to the baseline (or of the only arm's own
                 values), asks: the number of seeds; both are None with fewer than two seeds
    asked, seeds the largest number, and the seeds that every arm therefore runs: at most `at_most`
    """
    plan = study.seeds
    assert isinstance(plan, TwoStage)
    twin = on_test_split(study.metric)
    metric = twin if all(twin in found for found in values.values()) else study.metric
    labels = [arm.label for arm in study.design_arms() if arm.spec.control is None]
    references = study.references() or dict.fromkeys(labels, study.baseline or labels[0])
    comparisons = []
    for arm in labels if len(labels) == 1 else [label for label in labels if references.get(label, label) != label]:
        pair = [arm] if len(labels) == 1 else [arm, references[arm]]
        seeds = [seed for seed in study.first_seeds if all((label, seed) in values for label in pair)]
        scores = [[values[label, seed][metric] for seed in seeds] for label in pair]
        deviation = asks = None
        if len(seeds) > 1:
            deviation = float(np.std(scores[0] if len(pair) == 1 else np.subtract(scores[0], scores[1]), ddof=1))
            asks = max(plan.first, math.ceil(seeds_asked(deviation, len(seeds), plan.half_width)))
        comparisons.append({"arm": arm, "seeds": seeds, "deviation": deviation, "asks": asks})
    asked = max([plan.first, *(one["asks"] for one in comparisons if one["asks"] is not None)])
    return {
        "metric": metric,
        "decided": datetime.now(UTC).isoformat(timespec="seconds"),
        "comparisons": comparisons,
        "asked": asked,
        "seeds": list(range(min(asked, plan.at_most))),
    }
