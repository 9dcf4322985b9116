"""Fits an arm's validation accuracy against generated tokens by a saturating curve, or says why there is none.

The curve is ScaleRL's (Khatri et al. 2025, arXiv:2510.13786, eq. 1): R(C) = R_0 + (A - R_0) / (1 + (C_mid / C)^B). A is
the ceiling, C_mid the compute that reaches half of the gain, B the steepness of the rise. R_0 is fitted too, because
the evaluation before training is measured with noise like any other. All seeds are fitted together by least squares.

Intervals are over seeds: to first order the fit is the mean over seeds of each seed's influence value (Liang and Zeger
1986), so Student's interval of these values is the parameter's, with C_mid and B as logarithms. The values also pair
arms by seed, which distinguishes a higher ceiling from a faster rise.

No curve is stated if the data do not identify it (`_fit`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import optimize, special

from ....reports import statistics
from ....reports.analysis import Analysis
from ....reports.findings import collapse_step
from ....reports.statistics import Floats, Interval
from ...record.study import TrialRecord

COST = "train/generated_tokens"
FEWEST_POINTS = 8
BENT = 0.01  # p below which a curve without a ceiling is ruled out
LATEST = 0.75  # share of the compute; the interval of the midpoint must end below it
_A, _R0, _LOG_MID, _LOG_B = range(4)


@dataclass(frozen=True)
class Scaling:
    """The fitted curve of an arm.

    ceiling, midpoint, exponent  A, C_mid and B with intervals over seeds
    reached     share of the fitted gain at the end of training
    prediction  mean error, over the second half of compute, of the curve fitted to the first half, with its interval;
                None if the first half does not identify a curve
    """

    arm: str
    costs_ST: Floats
    scores_ST: Floats
    parameters: Floats
    by_seed: Mapping[int, Floats]
    ceiling: Interval
    midpoint: Interval
    exponent: Interval
    reached: float
    prediction: Interval | None


@dataclass(frozen=True)
class Scalings:
    """The curves of a study; `refused` maps an arm without a curve to the reason, `shifts` any but the baseline to its
    ceiling minus the baseline's and its midpoint over the baseline's, paired by seed; None without two seeds."""

    fits: Sequence[Scaling]
    refused: Mapping[str, str]
    shifts: Mapping[str, tuple[Interval | None, Interval | None]]


def scalings(analysis: Analysis) -> Scalings | None:
    """The curves of all arms with a result; None if the tokens are not known or the metric is no fraction."""
    record, usable = analysis.record, analysis.usable
    if not usable or any(COST not in one.history for one in usable.values()) or not analysis.outcome.is_fraction:
        return None
    fits, refused, shifts = [], {}, {}
    for arm in analysis.finished_arms:
        trials = [usable[arm.label, seed] for seed in arm.scores]
        fallen = [str(one.seed) for one in trials if collapse_step(one.history.get(record.metric, ())) is not None]
        found = f"seed {', '.join(fallen)} collapsed, and a curve that saturates cannot fall"
        if not fallen:
            points = _points(trials, record.metric)
            found = fit_curve(arm.label, list(arm.scores), *points)
        if isinstance(found, str):
            refused[arm.label] = found
        else:
            fits.append(found)
    base = next((one for one in fits if analysis.baseline is not None and one.arm == analysis.baseline.label), None)
    for one in fits:
        if base is not None and one is not base:
            seeds = sorted(one.by_seed.keys() & base.by_seed.keys())
            differences = [one.by_seed[seed] - base.by_seed[seed] for seed in seeds]
            ceiling, midpoint = (statistics.t_interval([d[i] for d in differences]) for i in (_A, _LOG_MID))
            shifts[one.arm] = (ceiling, midpoint and _exponential(midpoint))
    return Scalings(fits, refused, shifts)


def fit_curve(arm: str, seeds: Sequence[int], costs_ST: Floats, scores_ST: Floats) -> Scaling | str:
    """The curve of accuracies at points of compute, or the reason that there is none; each seed starts at 0."""
    found = _fit(costs_ST, scores_ST)
    if isinstance(found, str):
        return found
    parameters, values_S4 = found
    ceiling, middle, steepness = (_interval(values_S4[:, i]) for i in (_A, _LOG_MID, _LOG_B))
    prediction, half = None, costs_ST.mean(axis=0) <= costs_ST.mean(axis=0)[-1] / 2
    if not isinstance(early := _fit(costs_ST[:, half], scores_ST[:, half]), str):
        rest = costs_ST[:, ~half]
        moved = np.einsum("sti,si->s", _gradients(early[0], rest), early[1] - early[0]) / rest.shape[1]
        prediction = _interval((curve(early[0], rest) - scores_ST[:, ~half]).mean(axis=1) + moved)
    return Scaling(
        arm, costs_ST, scores_ST, parameters, dict(zip(seeds, values_S4, strict=True)),
        replace(ceiling, high=min(ceiling.high, 1.0)), _exponential(middle),
        _exponential(steepness), float(_share(parameters, costs_ST[:, -1].mean())), prediction,
    )  # fmt: skip


def curve(parameters: Floats, costs: Floats) -> Floats:
    """R(C); its limit R_0 at a compute of 0."""
    return parameters[_R0] + (parameters[_A] - parameters[_R0]) * _share(parameters, costs)


def _share(parameters: Floats, costs: Floats) -> Floats:
    return special.expit(math.exp(parameters[_LOG_B]) * (_log(costs) - parameters[_LOG_MID]))


def _fit(costs_ST: Floats, scores_ST: Floats) -> tuple[Floats, Floats] | str:
    """The parameters and each seed's influence values, or the reason that the data do not identify them."""
    if len(scores_ST) < 2:
        return "a single seed gives no estimate of a curve's uncertainty; run 2 or more"
    if scores_ST.shape[1] < FEWEST_POINTS:
        return (
            f"{scores_ST.shape[1]} evaluations shared by all seeds are too few for four parameters; "
            f"set evaluation.every for {FEWEST_POINTS} or more"
        )
    scale = float(costs_ST.max())
    parameters, _ = _least_squares(costs_ST / scale, scores_ST)
    jacobian = _gradients(parameters, costs_ST / scale)
    normal = np.einsum("sti,stj->ij", jacobian, jacobian) / len(scores_ST)
    pulls = np.einsum("sti,st->si", jacobian, scores_ST - curve(parameters, costs_ST / scale))
    if np.linalg.cond(normal) > 1e14:
        return "accuracy does not change enough for a curve"
    values_S4 = parameters + np.linalg.solve(normal, pulls.T).T
    gain, ceiling = parameters[_A] - parameters[_R0], _interval(values_S4[:, _A])
    if gain <= 0:
        return "accuracy does not rise"
    if _p_without_ceiling(costs_ST / scale, scores_ST) > BENT:
        return "the curve has not bent: a power law or a logarithm, without any ceiling, fits as well; train longer"
    if _interval(values_S4[:, _LOG_MID]).high >= math.log(LATEST * float((costs_ST / scale)[:, -1].mean())):
        return "half of the gain may come in the last quarter of training or later; train longer"
    if ceiling.high - ceiling.low >= gain:
        return "the interval of the ceiling is wider than the gain itself; run more seeds, or train longer"
    shift = np.array([0.0, 0.0, math.log(scale), 0.0])
    return parameters + shift, values_S4 + shift


def _p_without_ceiling(costs_ST: Floats, scores_ST: Floats) -> float:
    """The p of the F test, on the mean curve, of the better of two curves without a ceiling.

    The power law R_0 + c C^d is the limit of an ever higher ceiling. The logarithm R_0 + c ln(1 + k C), k up to 3000
    over the whole compute, has no ceiling, yet its residuals exceed the curve's by no more.
    """
    costs, scores = costs_ST.mean(axis=0)[None], scores_ST.mean(axis=0)[None]

    def left(rise: Floats) -> float:
        design = np.stack([np.ones(costs.size), rise], axis=1)
        return float(np.linalg.lstsq(design, scores[0])[1].sum())

    rises = [costs[0] ** power for power in np.geomspace(0.02, 10, 120)]
    rises += [np.log1p(rate * costs[0]) for rate in np.geomspace(0.3, 3000, 80)]
    without = min(map(left, rises))
    _, error = _least_squares(costs, scores)
    freedom = costs.size - 4
    return float(special.fdtrc(1, freedom, max(without - error, 0.0) * freedom / max(error, 1e-300)))


def _least_squares(costs_ST: Floats, scores_ST: Floats) -> tuple[Floats, float]:
    """The best parameters from several starts, and their residual sum of squares; costs are at most 1."""

    def residuals(parameters: Floats) -> Floats:
        return (curve(parameters, costs_ST) - scores_ST).ravel()

    def gradients(parameters: Floats) -> Floats:
        return _gradients(parameters, costs_ST).reshape(scores_ST.size, 4)

    slopes: Any = gradients  # scipy's stubs know only the names of its own schemes
    bounds = ([-0.5, -0.5, math.log(1e-4), -2.0], [1.5, 1.5, math.log(100.0), 2.5])
    found = []
    for middle in (0.05, 0.2, 0.6):
        for steepness in (0.0, 0.7):
            start = [float(scores_ST.max()) + 0.02, float(scores_ST[:, 0].mean()), math.log(middle), steepness]
            found.append(optimize.least_squares(residuals, start, slopes, bounds, x_scale=[0.1, 0.1, 1.0, 0.5]))
    best = min(found, key=lambda one: one.cost)
    return np.asarray(best.x), 2 * float(best.cost)


def _gradients(parameters: Floats, costs: Floats) -> Floats:
    """[..., 4]: the derivatives of the curve by A, R_0, log C_mid and log B."""
    share, steep = _share(parameters, costs), math.exp(parameters[_LOG_B])
    slope = (parameters[_A] - parameters[_R0]) * share * (1 - share)
    by_steep = slope * steep * (_log(costs) - parameters[_LOG_MID])
    return np.stack([share, 1 - share, -steep * slope, by_steep], axis=-1)


def _points(trials: Sequence[TrialRecord], metric: str) -> tuple[Floats, Floats]:
    """Compute and accuracy of each seed at the evaluations shared by all seeds."""
    series = [{s: v for s, v in trial.history.get(metric, ()) if math.isfinite(v)} for trial in trials]
    steps = sorted(set.intersection(*(set(one) for one in series)))
    spent = [np.array([(0.0, 0.0), *trial.history[COST]]) for trial in trials]
    places = [np.searchsorted(one[:, 0], steps, side="right") - 1 for one in spent]
    costs_ST = np.array([one[place, 1] for one, place in zip(spent, places, strict=True)], dtype=float)
    return costs_ST, np.array([[one[step] for step in steps] for one in series], dtype=float)


def _interval(values_S: Floats) -> Interval:
    found = statistics.t_interval(values_S)
    assert found is not None, "a fit has at least two seeds"
    return found


def _exponential(interval: Interval) -> Interval:
    return Interval(math.exp(interval.estimate), math.exp(interval.low), math.exp(min(interval.high, 700.0)))


def _log(costs: Floats) -> Floats:
    return np.log(np.maximum(costs, 1e-300))
