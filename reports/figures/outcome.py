"""Draws an outcome: each arm's, its difference to the baseline, and what it cost."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..analysis import Analysis
from ..prose import wording
from ..statistics import Interval
from ..trials import ArmSummary
from . import style
from .style import Draw, Drawing, End, axis_label, chart, color_of, cut, drawn, scale_of

_COSTS = (  # key of an arm's costs, label on the x axis, its unit
    ("seconds", "seconds per run", 1.0),
    ("generated_tokens", "generated tokens per run", 1.0),
    ("peak_memory_bytes", "peak memory, GiB", 2.0**30),
    ("flops_train", "operations of training per run", 1.0),
)
_COST_CAPTION = (
    "Mean over seeds with 95 % interval; up is more accurate, left is cheaper. Dashed: arms whose means no other arm "
    "beats in both."
)


class _Estimate(NamedTuple):
    label: str
    value: float
    interval: Interval | None
    seeds: Sequence[float]


def final_accuracy(analysis: Analysis) -> list[Drawing]:
    """Every arm's outcome: its mean with interval, and each seed as a dot."""
    shown = [_Estimate(a.label, a.mean, a.interval, list(a.scores.values())) for a in analysis.finished_arms]
    if not shown:
        return []
    title = f"{wording.capitalised(analysis.outcome.label)} of each arm at the end of training"
    caption = "Large mark: mean over seeds; bar: 95 % interval; small dots: single seeds."
    draw = _estimates(analysis, shown, axis_label(analysis.outcome.name, analysis.outcome.label))
    return [drawn("final", title, caption, draw, style.WIDE, style.rows_height([one.label for one in shown]))]


def differences(analysis: Analysis) -> list[Drawing]:
    """Every comparison with the baseline: the paired difference with interval and each seed's own difference."""
    shown = [_Estimate(c.arm, c.estimate, c.interval, list(c.differences.values())) for c in analysis.comparisons]
    if not shown:
        return []
    title = f"Difference to {cut(analysis.comparisons[0].baseline.label, 70)}, seed by seed"
    caption = "Large mark: mean paired difference; bar: 95 % interval; small dots: single seeds. Right of 0 is higher."
    draw = _estimates(analysis, shown, f"difference{', points' if analysis.outcome.is_fraction else ''}", signed=True)
    return [drawn("differences", title, caption, draw, style.WIDE, style.rows_height([one.label for one in shown]))]


def cost_against_accuracy(analysis: Analysis) -> list[Drawing]:
    """Each arm's outcome against what it cost, with the front of arms that no other beats in both."""
    drawings = []
    for key, label, unit in _COSTS:
        costs = [(arm, arm.costs[key] / unit) for arm in analysis.finished_arms if key in arm.costs]
        spent = [cost for _, cost in costs]
        if len(costs) > 1 and max(spent) > 1.05 * min(spent):
            title = f"{wording.capitalised(analysis.outcome.label)} against {label.partition(',')[0]}"
            draw = _scatter(analysis, costs, label)
            drawings.append(drawn(f"cost_{key}", title, _COST_CAPTION, draw, style.NARROW, 2.8))
    return drawings


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the (cost, value) points that no other matches in both and beats in one, cheapest first."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def _estimates(analysis: Analysis, shown: Sequence[_Estimate], x_label: str, signed: bool = False) -> Draw:
    """A row each: the seeds as dots, the interval as a bar, the value as a mark with its number at the right."""
    metric, scale = analysis.outcome.name, scale_of(analysis.outcome.name)

    def draw(figure: Figure) -> None:
        axes = style.rows(figure, [one.label for one in shown])
        if signed:
            axes.axvline(0, color=style.INK, lw=0.8)
        for row, one in enumerate(shown):
            color, seeds = color_of(analysis, one.label), scale * np.array(one.seeds)
            axes.plot(seeds, np.full(len(seeds), row + 0.24), "o", color=color, ms=3.2, alpha=0.65, mew=0)
            if one.interval is not None:
                ends = [scale * one.interval.low, scale * one.interval.high]
                axes.plot(ends, [row, row], color=color, lw=2.2, solid_capstyle="round")
            _mark(axes, analysis, one.label, scale * one.value, row)
            style.text_beside(axes, row, wording.number(one.value, metric, signed))
        axes.set_xlabel(x_label)

    return draw


def _mark(axes: Axes, analysis: Analysis, label: str, x: float, y: float) -> None:
    axes.plot([x], [y], style.marker_of(analysis, label), color=color_of(analysis, label), ms=6.5, mec="white", mew=0.8)


def _scatter(analysis: Analysis, costs: Sequence[tuple[ArmSummary, float]], label: str) -> Draw:
    scale = scale_of(analysis.outcome.name)

    def plot(axes: Axes) -> list[End]:
        front = pareto_front([(cost, arm.mean) for arm, cost in costs])
        steps = [(costs[i][1], scale * costs[i][0].mean) for i in front]
        axes.step(*zip(*steps, strict=True), where="post", color=style.MUTED, lw=0.9, ls=(0, (4, 3)), zorder=1)
        for arm, cost in costs:
            if arm.interval is not None:
                bar = [scale * arm.interval.low, scale * arm.interval.high]
                axes.plot([cost, cost], bar, color=color_of(analysis, arm.label), lw=1.4, alpha=0.6)
            _mark(axes, analysis, arm.label, cost, scale * arm.mean)
        axes.margins(x=0.12, y=0.1)
        ends = [(scale * arm.mean, arm.label, color_of(analysis, arm.label)) for arm, _ in costs]
        return [(y, style.end_label(analysis, label), color) for y, label, color in ends if color != style.GREY]

    return chart(plot, label, axis_label(analysis.outcome.name))
