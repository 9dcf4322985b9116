"""How often two arms are called different with pairs of runs and without, beside other methods: simulated studies.

`python tests/power.py --studies 500` prints percents for arms that are equal and for arms 12 points apart. Their runs
of one seed have luck that correlates more or less.
"""

import dataclasses
import itertools
import warnings

import error_rates
import numpy as np
import pandas
from cohort.reports.statistics import bootstrap_interval
from fake_study import wanted_studies
from numpy.random import Generator
from scipy import stats
from statsmodels.regression.mixed_linear_model import MixedLM

SEEDS = (3, 4, 5, 10)
CORRELATIONS = (-0.4, 0.0, 0.5, 0.95)
SHIFT = 0.645  # logits: 12 points


def by_pairing(rng: Generator, num_seeds: int, correlation: float, shift: float) -> dict[str, bool]:
    """Method -> whether it calls two arms different, whose runs of one seed have luck (6 points) that correlates and
    whose logits differ by `shift`: our report with and without pairs, and four methods over the means of the seeds."""
    luck = rng.multivariate_normal(np.zeros(2), [[1, correlation], [correlation, 1]], num_seeds).T[:, :, None]
    logits = (
        0.32 * luck
        + rng.normal(0, 1.2, 2 * error_rates.PROBLEMS)
        + rng.normal(0, 0.4, (2, num_seeds, 2 * error_rates.PROBLEMS))
    )
    scores = rng.binomial(4, 1 / (1 + np.exp(-logits - shift * np.array([[[0.0]], [[1.0]]])))) / 4
    record, (one, other) = (
        error_rates._scored(error_rates._record(error_rates._arms, 2, num_seeds), scores),
        scores.mean(axis=2),
    )
    apart = dataclasses.replace(record, spec={**record.spec, "pairing": "none"})
    resampled = bootstrap_interval(other - one, rng)
    means = pandas.DataFrame({"y": [*one, *other], "arm": [0] * num_seeds + [1] * num_seeds})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few seeds: a variance at its bound
        mixed = MixedLM.from_formula("y ~ arm", means, groups=[*range(num_seeds)] * 2).fit().pvalues["arm"]
    return {
        "pairing: seeds": error_rates._answered(record), "pairing: none": error_rates._answered(apart),
        "paired t": stats.ttest_rel(one, other).pvalue < 0.05,
        "Welch": stats.ttest_ind(one, other, equal_var=False).pvalue < 0.05,
        "bootstrap": resampled is not None and not resampled.low <= 0 <= resampled.high, "mixed model": mixed < 0.05,
    }  # fmt: skip


def table(studies: int) -> None:
    """Percent of studies in which each method calls the arms different, with each of SEEDS seeds."""
    for number, (correlation, shift) in enumerate(itertools.product(CORRELATIONS, (0.0, SHIFT))):
        found = {}
        for seeds in SEEDS:
            rng = np.random.default_rng([seeds, number, 2])
            told = pandas.DataFrame(by_pairing(rng, seeds, correlation, shift) for _ in range(studies))
            for method, value in told.mean().items():
                found.setdefault(method, []).append(f"{100 * value:.1f}")
        if not number:
            print(f"| correlation, points | {' | '.join(found)} |\n| --- |{' --: |' * len(found)}")
        print(f"| {correlation}, {12 if shift else 0} | {' | '.join(map('; '.join, found.values()))} |", flush=True)


if __name__ == "__main__":
    table(wanted_studies(__doc__, 500))
