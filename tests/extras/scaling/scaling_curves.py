"""Synthetic studies with a known saturating curve, and how often the fitted intervals enclose its ceiling.

`python tests/scaling_curves.py --studies 1000` prints one line per design; `test_scaling.py` runs fewer of the same.
"""

from dataclasses import dataclass

import numpy as np
from cohort.harness.extras.scaling.fits import Scaling, fit_curve
from fake_study import wanted_studies
from numpy.random import Generator


@dataclass(frozen=True)
class Design:
    """The curve of a seed ends at `ceiling` + N(0, `spread`), its midpoint moves by exp(N(0, 0.1)); an evaluation adds
    N(0, `noise`). Compute ends at 1. With a `rate` the curve is start + 0.1 ln(1 + rate C), which has no ceiling."""

    seeds: int = 5
    points: int = 21
    ceiling: float = 0.8
    start: float = 0.4
    middle: float = 0.2
    steepness: float = 1.5
    spread: float = 0.02
    noise: float = 0.015
    rate: float = 0.0


IDENTIFIED = {
    "3 seeds": Design(seeds=3),
    "5 seeds": Design(),
    "10 seeds": Design(seeds=10),
    "early, slow": Design(middle=0.1, steepness=1.2),
    "steep": Design(middle=0.3, steepness=3.0),
    "40 evaluations": Design(points=41, middle=0.15),
}
BORDERLINE = {"middle at half of training": Design(middle=0.5), "middle at 4 fifths": Design(middle=0.8)}
UNIDENTIFIED = {
    "one seed": Design(seeds=1),
    "6 evaluations": Design(points=6),
    "no gain": Design(ceiling=0.4),
    "falls": Design(ceiling=0.3),
    "ends long before its middle": Design(middle=3.0),
    "straight line": Design(middle=20.0, steepness=1.0, ceiling=5.0),
    "logarithm, 3 seeds": Design(seeds=3, start=0.3, noise=0.005, rate=20.0),
    "logarithm, 5 seeds": Design(seeds=5, start=0.3, noise=0.005, rate=20.0),
    "logarithm, 10 seeds": Design(seeds=10, start=0.3, noise=0.005, rate=20.0),
    "logarithm, 5 times as fast": Design(start=0.3, noise=0.005, rate=100.0),
    "logarithm, 41 evaluations": Design(start=0.3, noise=0.005, rate=20.0, points=41),
}


def draw(design: Design, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
    """Compute and accuracy, seeds by points."""
    one = (design.seeds, 1)
    costs = np.linspace(0, 1, design.points) * np.exp(rng.normal(0, 0.03, one))
    if design.rate:
        costs = np.tile(np.linspace(0, 1, design.points), one)
        return costs, design.start + 0.1 * np.log1p(design.rate * costs) + rng.normal(0, design.noise, costs.shape)
    ceiling = design.ceiling + rng.normal(0, design.spread, one)
    middle = design.middle * np.exp(rng.normal(0, 0.1, one))
    with np.errstate(divide="ignore", over="ignore"):
        share = 1 / (1 + (middle / costs) ** design.steepness)
    return costs, design.start + (ceiling - design.start) * share + rng.normal(0, design.noise, share.shape)


def simulate(design: Design, studies: int) -> tuple[float, float, float]:
    """Percent of studies without a curve; of the others, those whose intervals hold the ceiling, and the midpoint."""
    rng = np.random.default_rng([design.seeds, design.points, int(1000 * design.middle)])
    found = [fit_curve("a", range(design.seeds), *draw(design, rng)) for _ in range(studies)]
    fits = [one for one in found if isinstance(one, Scaling)]
    ceilings = [one.ceiling.low <= design.ceiling <= one.ceiling.high for one in fits]
    middles = [one.midpoint.low <= design.middle <= one.midpoint.high for one in fits]
    shares = [100 * float(np.mean(held)) if held else float("nan") for held in (ceilings, middles)]
    return 100 * (1 - len(fits) / studies), *shares


if __name__ == "__main__":
    studies = wanted_studies(__doc__, 1000)
    for name, design in (IDENTIFIED | BORDERLINE | UNIDENTIFIED).items():
        refused, ceiling, middle = simulate(design, studies)
        print(f"{name:30} refused {refused:5.1f} %  ceiling {ceiling:5.1f} %  midpoint {middle:5.1f} %", flush=True)
