"""Draws an outcome: each arm's, its difference to the baseline, and what it cost."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes

from ..analysis import Analysis, Comparison
from ..prose import wording
from ..trials import ArmSummary
from . import style
from .style import Drawing, End, axis_label, chart, color_of, cut, drawn, scale_of

_COSTS = (  # key of an arm's costs, label on the x axis, its unit
    ("seconds", "seconds per run", 1.0),
    ("generated_tokens", "generated tokens per run", 1.0),
    ("peak_memory_bytes", "peak memory, GiB", 2.0**30),
    ("flops_train", "operations of training per run", 1.0),
)
_COST_CAPTION = "Mean over seeds with 95 % interval; up is more accurate, left is cheaper."


def estimates(analysis: Analysis) -> list[Drawing]:
    """Every arm's outcome, and every paired difference to the baseline: a mean with its interval and seeds as dots."""
    outcome, arms, apart = analysis.outcome, analysis.finished_arms, analysis.comparisons
    marks, drawings = "bar: 95 % interval; small dots: single seeds.", []
    if arms:
        title = f"{wording.capitalised(outcome.label)} of each arm at the end of training"
        shown = {arm.label: (arm.mean, arm) for arm in arms}
        x_label = axis_label(outcome.name, outcome.label)
        drawings.append(_estimates("final", title, f"Large mark: mean over seeds; {marks}", analysis, shown, x_label))
    if apart:
        title = f"Difference to {cut(apart[0].baseline.label, 70)}, seed by seed"
        caption = f"Large mark: mean paired difference; {marks} Right of 0 is higher."
        shown, x_label = {one.arm: (one.estimate, one) for one in apart}, "difference"
        x_label += ", points" if outcome.is_fraction else ""
        drawings.append(_estimates("differences", title, caption, analysis, shown, x_label))
    return drawings


def cost_against_accuracy(analysis: Analysis) -> list[Drawing]:
    """Each arm's outcome against what it cost."""
    drawings = []
    for key, label, unit in _COSTS:
        costs = [(arm, arm.costs[key] / unit) for arm in analysis.finished_arms if key in arm.costs]
        spent = [cost for _, cost in costs]
        if len(costs) > 1 and max(spent) > 1.05 * min(spent):
            title = f"{wording.capitalised(analysis.outcome.label)} against {label.partition(',')[0]}"
            plot = partial(_scatter, analysis=analysis, costs=costs)
            draw = chart(plot, label, axis_label(analysis.outcome.name))
            drawings.append(drawn(f"cost_{key}", title, _COST_CAPTION, draw, style.NARROW, 2.8))
    return drawings


def _estimates(
    name: str,
    title: str,
    caption: str,
    analysis: Analysis,
    shown: Mapping[str, tuple[float, ArmSummary | Comparison]],
    x_label: str,
) -> Drawing:
    """A row each: the seeds as dots, the interval as a bar, the value as a mark with its number at the right."""
    metric, scale, signed = analysis.outcome.name, scale_of(analysis.outcome.name), name == "differences"

    def plot(axes: Axes) -> None:
        if signed:
            axes.axvline(0, color=style.INK, lw=0.8)
        for row, (label, (value, one)) in enumerate(shown.items()):
            color, seeds = color_of(analysis, label), scale * np.array(one.values)
            axes.plot(seeds, np.full(len(seeds), row + 0.24), "o", color=color, ms=3.2, alpha=0.65, mew=0)
            if one.interval is not None:
                ends = [scale * one.interval.low, scale * one.interval.high]
                axes.plot(ends, [row, row], color=color, lw=2.2, solid_capstyle="round")
            _mark(axes, analysis, label, scale * value, row)
            style.text_beside(axes, row, wording.number(value, metric, signed))
        axes.set_xlabel(x_label)

    return style.row_chart(name, title, caption, list(shown), plot)


def _mark(axes: Axes, analysis: Analysis, label: str, x: float, y: float) -> None:
    axes.plot([x], [y], style.marker_of(analysis, label), color=color_of(analysis, label), ms=6.5, mec="white", mew=0.8)


def _scatter(axes: Axes, analysis: Analysis, costs: Sequence[tuple[ArmSummary, float]]) -> list[End]:
    scale, ends = scale_of(analysis.outcome.name), []
    for arm, cost in costs:
        color = color_of(analysis, arm.label)
        if arm.interval is not None:
            bar = [scale * arm.interval.low, scale * arm.interval.high]
            axes.plot([cost, cost], bar, color=color, lw=1.4, alpha=0.6)
        _mark(axes, analysis, arm.label, cost, scale * arm.mean)
        if color != style.GREY:
            ends.append((scale * arm.mean, style.end_label(analysis, arm.label), color))
    axes.margins(x=0.12, y=0.1)
    return ends
