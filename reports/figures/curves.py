"""Draws curves: learning curves, training dynamics, pass@k and Cover@tau.

The curves of several seeds are aligned at positions that all of them have; dynamics are smoothed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from ...harness.record.study import TrialRecord
from ..analysis import Analysis
from ..capability import Capabilities, Capability, table_sizes
from ..prose import wording
from ..statistics import Floats, Interval
from . import style
from .style import Draw, Drawing, End, chart, color_of, drawn, look, scale_of, unit_of

_COSTS = (  # name of a figure, its metric, label on the x axis
    ("steps", None, "training steps"),
    ("rollouts", "train/rollouts", "sampled rollouts"),
    ("tokens", "train/generated_tokens", "generated tokens"),
    ("seconds", "seconds/total", "seconds"),
    ("flops", "flops/train", "operations of training"),
)
DYNAMICS = (  # metric, title, unit on the y axis
    ("train/accuracy", "Accuracy of training rollouts", "%"),
    ("reward/mean", "Mean reward per completion", "reward"),
    ("kl/reference", "Distance from the reference policy", "KL, nats per token"),
    ("policy/entropy", "Entropy of the policy", "nats per token"),
    ("completion/length", "Completion length", "tokens"),
    ("train/zero_variance_groups", "Groups whose rewards are all equal", "% of groups"),
    ("policy/clip_fraction", "Tokens stopped by clipping", "% of tokens"),
    ("train/masked_tokens", "Tokens left out of the loss with completions that were cut", "% of tokens"),
    ("train/gradient_tokens", "Tokens that carry gradient, of those in the loss", "% of tokens"),
    ("policy/grad_norm", "Gradient norm before clipping", "norm"),
    ("vote/label_accuracy", "Majority labels that are right", "%"),
    ("vote/margin", "Votes for the first answer minus votes for the second", "% of the group"),
    ("vote/false_positive_rate", "Wrong rollouts that agree with the majority", "%"),
    ("vote/answered", "Rollouts with an answer to vote with", "%"),
    ("critic/explained_variance", "Variance of returns explained by the critic", "fraction"),
)
_CAPTION = "Line: mean over seeds; band: lowest to highest seed."
_CAPABILITY_CAPTION = "Line: mean over seeds and problems; band: 95 % interval; dashed: before training."


@dataclass(frozen=True)
class _Line:
    """A curve with the name at its end, as it is shown; `band_2T` has the limits of its band, NaN without one.

    A grey line has no marker and no band.
    """

    name: str
    color: str
    x_T: Floats
    mean_T: Floats
    band_2T: Floats
    marker: str = ""
    is_dashed: bool = False


def learning_curves(analysis: Analysis, wanted: Sequence[str] = ()) -> list[Drawing]:
    """The study's metric against steps, rollouts, tokens, seconds and operations, or the `wanted` ones of these."""
    metric, drawings = analysis.record.metric, []
    for name, cost, label in (one for one in _COSTS if not wanted or one[0] in wanted):
        if lines := _arm_lines(analysis, metric, cost):
            title = f"{wording.capitalised(wording.spoken(metric))} against {label}"
            draw = _line_chart(lines, label, unit_of(metric))
            drawings.append(drawn(f"learning_{name}", title, _CAPTION, draw, style.WIDE, 2.7))
    return drawings


def dynamics(analysis: Analysis) -> list[Drawing]:
    """The inside of the runs: one small figure per metric that any arm recorded."""
    return [
        drawn(f"dynamics_{metric.replace('/', '_')}", title, _CAPTION, _line_chart(lines, "training steps", unit),
              style.NARROW, 2.6)
        for metric, title, unit in DYNAMICS
        if (lines := _arm_lines(analysis, metric, is_smooth=True))
    ]  # fmt: skip


def capability_curves(analysis: Analysis, found: Capabilities | None) -> list[Drawing]:
    """pass@k and Cover@tau of every arm, before and after training."""
    if found is None:
        return []
    most = max(one.num_samples for one in found.after.values())
    sizes = np.unique(np.geomspace(1, most, 50).round())
    taus = np.linspace(0, 1, 41)[1:]

    def lines(
        x_X: Floats, read: Callable[[Capability, float], tuple[Floats, Interval | None]], scale: float
    ) -> list[_Line]:
        """`read` gives each problem's value at a position and the interval of their mean."""
        drawn_lines = []
        for one, is_start in [*((one, True) for one in found.before), *((one, False) for one in found.after.values())]:
            shown = x_X[x_X <= one.num_samples]
            points = [read(one, float(x)) for x in shown]
            band = [(math.nan, math.nan) if limits is None else (limits.low, limits.high) for _, limits in points]
            mean = np.array([100 * float(values.mean()) for values, _ in points])
            is_arm = one.label in [arm.label for arm in analysis.arms]
            name = "before training" if is_start else style.end_label(analysis, one.label)
            color = color_of(analysis, one.label) if is_arm else style.MUTED
            drawn_lines.append(_Line(name, color, scale * shown, mean, 100 * np.array(band).T, is_dashed=is_start))
        return drawn_lines

    passes = lines(sizes, lambda one, k: (one.passes(int(k)), one.pass_at(int(k))), 1.0)
    covers = lines(taus, lambda one, tau: (one.covers(tau), one.cover_at(tau)), 100.0)
    return [
        drawn("pass_at_k", "pass@k of the test problems", _CAPABILITY_CAPTION,
              _line_chart(passes, "k samples", "%", table_sizes(most)), style.WIDE, 2.9),
        drawn("cover_at_tau", "Cover@tau: problems solved at least this often", _CAPABILITY_CAPTION,
              _line_chart(covers, "tau, % of a problem's samples that are right", "%"), style.WIDE, 2.9),
    ]  # fmt: skip


def aligned(trials: Sequence[TrialRecord], metric: str, cost: str | None = None) -> tuple[Floats, Floats] | None:
    """A metric of several seeds at shared positions: the steps that all have, or an even grid of a cumulative cost.

    The positions x_T, and one row of values_ST per seed. Values that are not finite are left out. None if no seed has
    the metric or the seeds share no position.
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
    return (x, np.array(rows, dtype=float)) if x.size else None


def _arm_lines(analysis: Analysis, metric: str, cost: str | None = None, *, is_smooth: bool = False) -> list[_Line]:
    """A line per arm that recorded the metric, with the arm's marker at measured steps (over a cost, seeds have none in
    common), or as a centred moving average over 1/40 of the steps (at least 1), shorter at the ends. Of an arm's
    complete trials, or of its unfinished ones while it has none."""
    found = []
    for arm in [one.label for one in analysis.arms]:
        trials = [trial for trial in analysis.record.trials if trial.arm == arm]
        complete = [trial for trial in trials if trial.state == "complete"]
        own = complete or [trial for trial in trials if trial.state in ("running", "stopped")]
        if (series := aligned(own, metric, cost)) is not None:
            x_T, values_ST = series[0], scale_of(metric) * series[1]
            if is_smooth and (reach := x_T.size // 80):
                window = [slice(max(0, i - reach), i + reach + 1) for i in range(x_T.size)]
                values_ST = np.stack([values_ST[:, part].mean(axis=1) for part in window], axis=1)
            ends = np.stack([values_ST.min(axis=0), values_ST.max(axis=0)])
            band_2T = ends if len(values_ST) > 1 else np.full_like(ends, math.nan)
            name, (color, marker) = style.end_label(analysis, arm), look(analysis, arm)
            name += " (unfinished)" if name and not complete else ""
            marker = "" if is_smooth or cost else marker
            found.append(_Line(name, color, x_T, values_ST.mean(axis=0), band_2T, marker))
    return found


def _line_chart(lines: Iterable[_Line], x_label: str, unit: str, log_ticks: Sequence[int] = ()) -> Draw:
    """With `log_ticks` the x axis is logarithmic. Of several dashed lines none has a name."""
    lines = sorted(lines, key=lambda line: line.color != style.GREY)  # grey lines lie below the others
    is_named = [not line.is_dashed or sum(one.is_dashed for one in lines) == 1 for line in lines]

    def plot(axes: Axes) -> list[End]:
        for line in lines:
            is_grey, every = line.color == style.GREY, max(1, line.x_T.size // 8)
            if not is_grey:
                axes.fill_between(line.x_T, *line.band_2T, color=line.color, alpha=0.15, lw=0)
            marks = {"marker": line.marker, "ms": 3.4, "markevery": every} if line.marker and not is_grey else {}
            look = {"lw": 0.9 if is_grey else 1.7, "ls": "--" if line.is_dashed else "-", **marks}
            axes.plot(line.x_T, line.mean_T, color=line.color, solid_capstyle="round", **look)
        if log_ticks:
            axes.set_xscale("log")
            axes.minorticks_off()
            axes.set_xticks(log_ticks, [f"{tick}" for tick in log_ticks])
        shown = [line for line, named in zip(lines, is_named, strict=True) if named and line.color != style.GREY]
        return [(float(line.mean_T[-1]), line.name, line.color) for line in shown]

    return chart(plot, x_label, unit)
