"""Decides how the curves of several seeds are aligned and smoothed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.types import TrialRecord
from reports.analysis import Analysis
from reports.statistics import Floats


@dataclass(frozen=True)
class Series:
    """A metric of one arm: one row of `values_ST` per seed at the shared positions `x_T`."""

    x_T: Floats
    values_ST: Floats


def curve_trials(analysis: Analysis) -> dict[str, list[TrialRecord]]:
    """Arm -> the trials that its curves show: the complete ones, or the unfinished ones while none is complete."""
    trials = [trial for trial in analysis.record.trials if trial.state == "complete"]
    if not trials:
        trials = [trial for trial in analysis.record.trials if trial.state in ("running", "stopped")]
    chosen = {arm.label: [trial for trial in trials if trial.arm == arm.label] for arm in analysis.arms}
    return {label: found for label, found in chosen.items() if found}


def aligned(trials: Sequence[TrialRecord], metric: str, cost: str | None = None) -> Series | None:
    """A metric of several seeds at shared positions: the steps that all have, or an even grid of a cumulative cost.

    Values that are not finite are left out. None if no seed has the metric or the seeds share no position.
    """
    curves = []
    for trial in trials:
        pairs = [(step, value) for step, value in trial.history.get(metric, ()) if math.isfinite(value)]
        if cost is not None:
            spent = np.array([(-math.inf, 0.0), *trial.history.get(cost, ())])  # nothing before the first step
            place = np.searchsorted(spent[:, 0], [step for step, _ in pairs], side="right") - 1
            pairs = list(zip(spent[place, 1], (value for _, value in pairs), strict=True)) if len(spent) > 1 else []
        if pairs:
            curves.append(dict(pairs))
    if not curves:
        return None
    if cost is None:
        x = np.array(sorted(set.intersection(*(set(curve) for curve in curves))), dtype=float)
        rows = [[curve[step] for step in x] for curve in curves]
    else:
        start, end = max(min(curve) for curve in curves), min(max(curve) for curve in curves)
        x = np.linspace(start, end, 41) if end > start else np.array([])
        rows = [np.interp(x, list(curve), list(curve.values())) for curve in curves]
    return Series(x, np.array(rows, dtype=float)) if x.size else None


def smoothed(series: Series) -> Series:
    """A centred moving average over 1/40 of the steps (at least 1), shorter at the ends."""
    reach = series.x_T.size // 80
    if reach == 0:
        return series
    window = [slice(max(0, i - reach), i + reach + 1) for i in range(series.x_T.size)]
    return Series(series.x_T, np.stack([series.values_ST[:, part].mean(axis=1) for part in window], axis=1))
