"""Draws outcomes: of arms, by difficulty, over a grid, over a search (importances, slices)."""

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator

from ...harness.base.arms import short_path
from ..analysis import Analysis, Comparison, Contrast
from ..anova import Grid
from ..claims import JudgedClaim
from ..prose import wording
from ..trials import ArmSummary, score, search_of, tuning_of
from . import style
from .style import Drawing, End, chart, drawn, scale_of, unit_of, wrapped

_MOST_COLUMNS, _MOST_LEVELS = 8, 6
_LOGARITHMIC = 20  # largest value over smallest from which on a scale is logarithmic
_LIGHT_TEXT = 0.75  # position from which on light text on a cell has more contrast than dark text


def estimates(analysis: Analysis) -> list[Drawing]:
    """Every arm's outcome, and every paired difference to the baseline: a mean with its interval and seeds as dots."""
    outcome, apart = analysis.outcome, analysis.comparisons
    marks, drawings = "bar: 95 % interval; small dots: single seeds.", []
    if arms := {arm.label: arm for arm in analysis.finished_arms}:
        title = f"{wording.capitalised(outcome.label)} of each arm at the end of training"
        plot = partial(_estimates, analysis, arms, f"{outcome.label}{', %' if outcome.is_fraction else ''}")
        drawings.append(style.row_chart("final", title, f"Large mark: mean over seeds; {marks}", list(arms), plot))
    if pairs := {one.name: one for one in apart}:
        title = f"Difference {f'to {apart[0].baseline.label}' if apart[0].is_alone else 'of arms'}"
        caption = f"Large mark: mean difference{', seed by seed' * apart[0].is_paired}; {marks} Right of 0 is higher."
        plot = partial(_estimates, analysis, pairs, f"difference{', points' if outcome.is_fraction else ''}")
        drawings.append(style.row_chart("differences", title, caption, list(pairs), plot))
    return drawings


def heat_maps(analysis: Analysis) -> list[Drawing]:
    """The outcome over two factors; for three, one map per level of the third (the one with the fewest levels)."""
    grid = analysis.grid
    if grid is None or len(grid.factors) not in (2, 3) or not analysis.finished_arms:
        return []
    kept, maps = [0, 1], [(f" by {wording.factor_title(grid.factors)}", grid.labels)]
    if len(grid.factors) == 3:
        last = min(range(3), key=lambda axis: len(grid.levels[axis]))
        name = short_path(grid.factors[last])
        kept = [axis for axis in range(3) if axis != last]
        maps = [(f", {name} = {level}", grid.labels.take(i, axis=last)) for i, level in enumerate(grid.levels[last])]
    title = f"{wording.capitalised(analysis.outcome.label)}{' (%)' if analysis.outcome.is_fraction else ''}"
    why = "no effect of the grid is detected" if grid.effects else "no test of the grid is possible yet"
    shade = "stronger colour is higher" if grid.is_any_detected else f"{why}, so all cells have one colour"
    caption = f"Mean over seeds with its 95 % interval; {shade}."
    return [
        drawn(f"heat_{index}", f"{title}{suffix}", caption, partial(_heat_map, analysis, grid, labels, kept),
              style.WIDE, 1.1 + 0.62 * labels.shape[0])
        for index, (suffix, labels) in enumerate(maps)
    ]  # fmt: skip


def difficulty_maps(analysis: Analysis) -> list[Drawing]:
    """Test accuracy by arm and by a tag whose values are numbers, such as depth or level: one map per such tag.

    Rows are arms, or the values of a tag that has too many for columns; there is no map for too many of both.
    """
    trials = {(trial.arm, trial.seed): trial for trial in analysis.record.trials if trial.state == "complete"}
    arms = {arm.label: [trials[arm.label, seed] for seed in arm.scores] for arm in analysis.finished_arms}
    tags: dict[str, dict[int, str]] = {}
    for metric in sorted({key for seeds in arms.values() for trial in seeds for key in trial.history}):
        if found := re.fullmatch(r"test/accuracy_([a-z_]+)_(\d+)", metric):
            tags.setdefault(found[1], {})[int(found[2])] = metric
    drawings = []
    for tag, metrics in tags.items():
        values = sorted(metrics)
        named = [metrics[value] for value in values]
        known = [[[x for t in seeds if (x := score(t, m)) is not None] for m in named] for seeds in arms.values()]
        means = np.array([[fmean(found) if found else math.nan for found in row] for row in known])
        down, across, name = list(arms), [str(value) for value in values], tag.replace("_", " ")
        title = f"Test accuracy (%) by {name}"
        if len(across) > max(len(down), _MOST_COLUMNS):
            means, down, across, name = means.T, across, down, ""
        if len(values) < 2 or len(across) > _MOST_COLUMNS:
            continue
        caption = "Mean over seeds; stronger colour is higher. Differences between cells are not tested."
        plot = partial(_difficulty_map, means=means, across=across, name=name)
        drawings.append(style.row_chart(f"difficulty_{len(drawings)}", title, caption, down, plot))
    return drawings


def importances(analysis: Analysis) -> list[Drawing]:
    """The importance of each parameter for a search's metric; empty for a search with too few arms."""
    search = search_of(analysis.record)
    if search is None or not search["importances"]["values"]:
        return []
    found = search["importances"]
    ranked = sorted(found["values"].items(), key=lambda item: -item[1])
    names, shares = [short_path(name) for name, _ in ranked], [100 * share for _, share in ranked]

    def plot(axes: Axes) -> None:
        axes.barh(range(len(shares)), shares, height=0.5, color=style.PALETTE[0])
        axes.set_xlim(0, None)
        for row, share in enumerate(shares):
            style.text_beside(axes, row, f"{share:.0f}")
        axes.set_xlabel("% of importance")

    title = f"What {wording.spoken(analysis.record.metric)} depends on"
    caption = f"Importance by {found['method']}, over the arms that the search finished."
    return [style.row_chart("importance_0", title, caption, names, plot)]


def slices(analysis: Analysis) -> list[Drawing]:
    """The metric of every arm of a search against one setting, for each setting, the most important first."""
    caption, drawings, own = "A dot per arm; bar: mean of the arms at a level.", [], search_of(analysis.record)
    searches = tuning_of(analysis.record) or ({} if own is None else {"": own})  # tuned arm -> its search
    for number, (name, search) in enumerate(searches.items()):
        metric, importance = analysis.record.metric, search["importances"]["values"]
        arms = [arm for arm in search["arms"] if math.isfinite(arm["values"].get(metric, math.nan))]
        if len(arms) < 2:
            continue
        shared = [path for path in arms[0]["parameters"] if all(path in arm["parameters"] for arm in arms)]
        values = [scale_of(metric) * arm["values"][metric] for arm in arms]
        of = f" of {name}" if name else ""
        for place, path in enumerate(sorted(shared, key=lambda path: -importance.get(path, 0.0))):
            title = f"{wording.capitalised(wording.spoken(metric))} against {short_path(path)}{of}"
            plot = partial(_slice, [arm["parameters"][path] for arm in arms], values)
            draw = chart(plot, path, unit_of(metric))
            drawings.append(drawn(f"slice_{number}_{place}", title, caption, draw, style.NARROW, 2.6))
    return drawings


def _estimates(analysis: Analysis, shown: Mapping[str, ArmSummary | Comparison], x_label: str, axes: Axes) -> None:
    """A row each: the seeds as dots, the interval as a bar, the value as a mark with its number at the right."""
    metric, scale = analysis.outcome.name, scale_of(analysis.outcome.name)
    for row, (label, one) in enumerate(shown.items()):
        is_difference = isinstance(one, Comparison)
        if is_difference and row == 0:
            axes.axvline(0, color=style.INK, lw=0.8)
        (color, marker), seeds = style.look(analysis, label), scale * np.array(one.values)
        axes.plot(seeds, np.full(len(seeds), row + 0.24), "o", color=color, ms=3.2, alpha=0.65, mew=0)
        if one.interval is not None:
            ends = [scale * one.interval.low, scale * one.interval.high]
            axes.plot(ends, [row, row], color=color, lw=2.2, solid_capstyle="round")
        value = one.estimate if is_difference else one.mean
        axes.plot([scale * value], [row], marker, color=color, ms=6.5, mec="white", mew=0.8)
        style.text_beside(axes, row, wording.number(value, metric, signed=is_difference))
    axes.set_xlabel(x_label)


def claims(found: Sequence[JudgedClaim]) -> list[Drawing]:
    """The contrasts of each claim with their intervals against the region that it predicts: a figure per unit."""
    units: dict[tuple[bool, str], list[tuple[JudgedClaim, str, Contrast]]] = {}
    for claim in found:
        unit = "difference, points" if wording.is_fraction(claim.metric) else wording.spoken(claim.metric)
        rows = [(claim, name, each) for name, each in claim.found if each.interval is not None]
        units.setdefault((claim.is_ratio, "ratio" if claim.is_ratio else unit), []).extend(rows)
    drawings = []
    for (is_ratio, unit), rows in units.items():
        if rows:
            title = "Each claim against its prediction"
            caption = "Shaded: where the contrast should lie; bar: 95 % interval."
            labels = [claim.sentence if len(claim.found) == 1 else name for claim, name, _ in rows]
            plot = partial(_claims, rows, is_ratio, unit)
            drawings.append(style.row_chart(f"claims_{len(drawings)}", title, caption, labels, plot))
    return drawings


def _claims(rows: Sequence[tuple[JudgedClaim, str, Contrast]], is_ratio: bool, unit: str, axes: Axes) -> None:
    scale = 1.0 if is_ratio else scale_of(rows[0][0].metric)

    def at(value: float) -> float:
        return math.exp(value) if is_ratio else scale * value

    shown = [at(0.0), *(at(end) for claim, _, _ in rows for end in claim.region if math.isfinite(end))]
    shown += [at(end) for _, _, one in rows if one.interval for end in (one.interval.low, one.interval.high)]
    room = 0.08 * (max(shown) - min(shown))
    left, right = min(shown) - room, max(shown) + room
    axes.axvline(at(0.0), color=style.INK, lw=0.8)
    for row, (claim, _, one) in enumerate(rows):
        low, high = (min(max(at(end) if math.isfinite(end) else end, left), right) for end in claim.region)
        axes.barh(row, high - low, left=low, height=0.72, color=style.SHADE, alpha=0.16)
        if one.interval is not None:
            axes.plot([at(one.interval.low), at(one.interval.high)], [row, row], color=style.INK, lw=2.2)
        axes.plot([at(one.estimate)], [row], "o", color=style.INK, ms=6.5, mec="white", mew=0.8)
        number = f"{at(one.estimate):.2f}" if is_ratio else wording.number(one.estimate, claim.metric, signed=True)[:6]
        style.text_beside(axes, row, number)
    axes.set_xlim(left, right)
    axes.set_xlabel(unit)


def _heat_map(analysis: Analysis, grid: Grid, labels: np.ndarray, kept: Sequence[int], figure: Figure) -> None:
    """A cell per arm; colour follows the mean only if an effect is detected, because noise gets no colour."""
    metric, means = analysis.outcome.name, [arm.mean for arm in analysis.finished_arms]
    down, across = kept
    low, high = min(means), max(means)  # one scale for all maps of a study
    axes = figure.add_subplot()
    for (row, column), label in np.ndenumerate(labels):
        arm = analysis.arm(str(label))
        position = (arm.mean - low) / (high - low) if grid.is_any_detected and high > low else 0.1
        value = "no result" if math.isnan(arm.mean) else wording.number(arm.mean, metric)
        limits = wording.limits(arm.interval, metric).strip("[]").replace(", ", " to ")
        _cell(axes, row, column, position if arm.scores else math.nan, value, limits)
    axes.set_ylim(labels.shape[0] - 0.5, -0.5)
    axes.set_yticks(range(labels.shape[0]), ["\n".join(wrapped(str(level), 12)) for level in grid.levels[down]])
    axes.set_ylabel(short_path(grid.factors[down]))
    _columns(axes, grid.levels[across], short_path(grid.factors[across]))


def _difficulty_map(axes: Axes, means: np.ndarray, across: Sequence[str], name: str) -> None:
    """A cell per arm and value of a tag; `name` is written below what stands across."""
    low, high = np.nanmin(means), np.nanmax(means)
    axes.grid(visible=False)
    for (row, column), mean in np.ndenumerate(means):
        position = (mean - low) / (high - low) if high > low or math.isnan(mean) else 0.1
        _cell(axes, row, column, position, "-" if math.isnan(mean) else wording.number(mean, "test/accuracy"))
    _columns(axes, across, name)


def _cell(axes: Axes, row: int, column: int, position: float, value: str, limits: str = "") -> None:
    """A cell for a value at a position between the lowest and the highest; NaN for none."""
    shade: dict[str, Any] = {"color": style.SHADE, "alpha": 0.08 + 0.84 * position}
    shade = {"color": style.EMPTY} if math.isnan(position) else shade
    axes.add_patch(Rectangle((column - 0.485, row - 0.485), 0.97, 0.97, lw=0, **shade))
    ink = "white" if position >= _LIGHT_TEXT else style.INK
    centred: dict[str, Any] = {"ha": "center", "va": "center", "color": ink}
    axes.text(column, row - (0.1 if limits else 0), value, weight="bold", size=9.5 if limits else 8.5, **centred)
    if limits:
        axes.text(column, row + 0.2, limits, size=7, **centred)


def _columns(axes: Axes, names: Sequence[Any], label: str) -> None:
    """Names and label below the columns of a map, without a frame."""
    axes.set_xlim(-0.5, len(names) - 0.5)
    _name_places(axes, names)
    axes.set_xlabel(label)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)


def _name_places(axes: Axes, names: Sequence[Any]) -> None:
    """Whole names below 0, 1, 2, ..., in lines that leave each other room."""
    axes.set_xticks(range(len(names)), ["\n".join(wrapped(str(name), max(4, 44 // len(names)))) for name in names])


def _slice(settings: Sequence[Any], values: Sequence[float], axes: Axes) -> list[End]:
    """Numbers that rarely repeat stand on a scale, which is logarithmic if they span much; others side by side."""
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in settings)
    levels = list({str(value): value for value in settings}.values())
    if are_numbers and len(levels) >= min(len(settings), _MOST_LEVELS + 1):
        places, low, high = settings, min(settings), max(settings)
        is_log = low > 0 and high / low >= _LOGARITHMIC
        locator = LogLocator(subs=(1.0, 3.0)) if is_log else MaxNLocator(4, steps=style.STEPS)
        ticks = [float(mark) for mark in locator.tick_values(low, high) if low <= mark <= high] or [low]
        axes.set_xscale("log" if is_log else "linear")
        axes.minorticks_off()
        axes.set_xticks(ticks, [wording.short(tick) for tick in ticks])
    else:
        levels = sorted(levels) if are_numbers else levels
        names = [str(level) for level in levels]
        places = [names.index(str(value)) for value in settings]
        for place in range(len(names)):
            mean = fmean(value for value, at in zip(values, places, strict=True) if at == place)
            axes.plot([place - 0.3, place + 0.3], [mean, mean], color=style.INK, lw=1.2, zorder=1)
        axes.set_xlim(-0.5, len(names) - 0.5)
        _name_places(axes, [wording.short(level) for level in levels])
    axes.scatter(places, values, s=20, color=style.PALETTE[0], alpha=0.6, linewidths=0, zorder=2)
    return []
