"""Decides how an outcome is drawn: each arm's, its difference to the baseline, and what it cost."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..analysis import Analysis, ArmSummary
from ..prose import wording
from ..statistics import Interval
from .axes import PLOT, axis_label, cut, label_ends, rows, rows_height, scale_of, tidy, write_unit
from .style import GREY, INK, MUTED, NARROW, WIDE, Draw, Drawing, color_of, drawn, end_label, marker_of


class _Estimate(NamedTuple):
    label: str
    value: float
    interval: Interval | None
    seeds: Sequence[float]


def final_accuracy(analysis: Analysis) -> list[Drawing]:
    """Every arm's outcome: its mean with interval, and each seed as a dot."""
    arms = analysis.finished_arms
    if not arms:
        return []
    shown = [_Estimate(arm.label, arm.mean, arm.interval, list(arm.scores.values())) for arm in arms]
    draw = _estimates(analysis, shown, axis_label(analysis.outcome.name, analysis.outcome.label))
    title = f"{wording.capitalised(analysis.outcome.label)} of each arm at the end of training"
    caption = "Large mark: mean over seeds; bar: 95 % interval; small dots: single seeds."
    return [drawn("final", title, caption, draw, WIDE, rows_height([arm.label for arm in arms]))]


def differences(analysis: Analysis) -> list[Drawing]:
    """Every comparison with the baseline: the paired difference with interval and each seed's own difference."""
    baseline = analysis.baseline
    if not analysis.comparisons or baseline is None:
        return []
    shown = []
    for one in analysis.comparisons:
        scores = analysis.arm(one.arm).scores
        seeds = [scores[seed] - baseline.scores[seed] for seed in one.seeds]
        shown.append(_Estimate(one.arm, one.estimate, one.interval, seeds))
    draw = _estimates(analysis, shown, f"difference{', points' if analysis.outcome.is_fraction else ''}", signed=True)
    title = f"Difference to {cut(baseline.label, 70)}, seed by seed"
    caption = "Large mark: mean paired difference; bar: 95 % interval; small dots: single seeds. Right of 0 is higher."
    return [drawn("differences", title, caption, draw, WIDE, rows_height([one.arm for one in analysis.comparisons]))]


def cost_against_accuracy(analysis: Analysis) -> list[Drawing]:
    """Each arm's outcome against what it cost, with the front of arms that no other beats in both."""
    drawings = []
    for key, label, unit in (
        ("seconds", "seconds per run", 1.0),
        ("generated_tokens", "generated tokens per run", 1.0),
        ("peak_memory_bytes", "peak memory, GiB", 2.0**30),
        ("flops_train", "operations of training per run", 1.0),
    ):
        arms = [arm for arm in analysis.finished_arms if key in arm.costs]
        spent = [arm.costs[key] for arm in arms]
        if len(arms) > 1 and max(spent) > 1.05 * min(spent):
            draw = _scatter(analysis, [(arm, arm.costs[key] / unit) for arm in arms], label)
            title = f"{wording.capitalised(analysis.outcome.label)} against {label.partition(',')[0]}"
            caption = (
                "Mean over seeds with 95 % interval; up is more accurate, left is cheaper. Dashed: arms whose means no "
                "other arm beats in both."
            )
            drawings.append(drawn(f"cost_{key}", title, caption, draw, NARROW, 2.8))
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
    metric = analysis.outcome.name
    scale = scale_of(metric)

    def draw(figure: Figure) -> None:
        axes = rows(figure, [one.label for one in shown])
        if signed:
            axes.axvline(0, color=INK, lw=0.8)
        for row, one in enumerate(shown):
            color, seeds = color_of(analysis, one.label), scale * np.array(one.seeds)
            axes.plot(seeds, np.full(len(seeds), row + 0.24), "o", color=color, ms=3.2, alpha=0.65, mew=0)
            if one.interval is not None:
                ends = [scale * one.interval.low, scale * one.interval.high]
                axes.plot(ends, [row, row], color=color, lw=2.2, solid_capstyle="round")
            _mark(axes, analysis, one.label, scale * one.value, row)
            text = wording.number(one.value, metric, signed)
            axes.text(1.03, row, text, transform=axes.get_yaxis_transform(), va="center", weight="bold")
        axes.set_xlabel(x_label)

    return draw


def _mark(axes: Axes, analysis: Analysis, label: str, x: float, y: float) -> None:
    axes.plot([x], [y], marker_of(analysis, label), color=color_of(analysis, label), ms=6.5, mec="white", mew=0.8)


def _scatter(analysis: Analysis, costs: Sequence[tuple[ArmSummary, float]], label: str) -> Draw:
    scale = scale_of(analysis.outcome.name)

    def draw(figure: Figure) -> None:
        axes = figure.add_axes(PLOT)
        ends = []
        front = pareto_front([(cost, arm.mean) for arm, cost in costs])
        steps = [(costs[i][1], scale * costs[i][0].mean) for i in front]
        axes.step(*zip(*steps, strict=True), where="post", color=MUTED, lw=0.9, ls=(0, (4, 3)), zorder=1)
        for arm, cost in costs:
            color = color_of(analysis, arm.label)
            if arm.interval is not None:
                ends_of_bar = [scale * arm.interval.low, scale * arm.interval.high]
                axes.plot([cost, cost], ends_of_bar, color=color, lw=1.4, alpha=0.6)
            _mark(axes, analysis, arm.label, cost, scale * arm.mean)
            if color != GREY:
                ends.append((scale * arm.mean, end_label(analysis, arm.label), color))
        axes.margins(x=0.12, y=0.1)
        axes.set_xlabel(label)
        write_unit(axes, axis_label(analysis.outcome.name))
        tidy(axes)
        label_ends(axes, ends)

    return draw
