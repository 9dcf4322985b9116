"""Decides how results are drawn: each figure answers one question, says so in its title, and names its own lines.

Colours are Okabe and Ito's (2008) palette, safe for colour-blind readers, with a marker per arm for print without
colour. Arms keep their colour in every figure; where there are more arms than colours, the baseline, the highest and
the lowest are coloured and the others grey. SVG output is deterministic, with text kept as text. Labels are drawn as
they are: matplotlib's own mathematics is off, so a `$` in a label is a dollar sign.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from harness.types import TrialRecord, short_path
from reports import prose
from reports.analysis import ALPHA, Analysis, ArmSummary, is_fraction, marginal, setting
from reports.statistics import Floats, Interval

INK, MUTED, RULE, GREY = "#1d2126", "#5c6570", "#e4e7eb", "#b9bfc6"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
FORMATS = ("svg", "png", "pdf")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_PLOT = (0.1, 0.155, 0.66, 0.65)  # left, bottom, width, height of a line chart, as fractions of the figure
_WIDE, _NARROW = 4.1, 3.7  # inches; 72 SVG units each, so that 8.5 pt text stays legible on a phone
_STEPS = [1, 2, 2.5, 5, 10]
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "text.parse_math": False,
    "axes.unicode_minus": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "cohort",
    "pdf.fonttype": 3,  # five times faster than 42
    "path.simplify": True,
}

# What a user's own matplotlibrc says must not change a report.
_FRESH_STYLE: Any = {**matplotlib.rcParamsDefault, "backend": "agg", **_STYLE}

# metric, title, unit on the y axis
DYNAMICS = (
    ("train/accuracy", "Accuracy of training rollouts", "%"),
    ("reward/mean", "Mean reward per completion", "reward"),
    ("kl/reference", "Distance from the reference policy", "KL, nats per token"),
    ("policy/entropy", "Entropy of the policy", "nats per token"),
    ("completion/length", "Completion length", "tokens"),
    ("train/zero_variance_groups", "Groups whose rewards are all equal", "% of groups"),
    ("policy/clip_fraction", "Tokens stopped by clipping", "% of tokens"),
    ("policy/grad_norm", "Gradient norm before clipping", "norm"),
    ("critic/explained_variance", "Variance of returns explained by the critic", "fraction"),
)


@dataclass(frozen=True)
class Drawing:
    """One figure: `name` is its file stem, `caption` how to read it, `svg` an inline SVG element."""

    name: str
    title: str
    caption: str
    svg: str
    figure: Figure

    def file(self, suffix: str) -> bytes:
        """The figure as a file: svg, png or pdf."""
        if suffix == "svg":
            return f'<?xml version="1.0" encoding="utf-8"?>\n{self.svg}\n'.encode()
        with matplotlib.rc_context(_FRESH_STYLE):
            return _saved(self.figure, suffix)


@dataclass(frozen=True)
class Series:
    """A metric of one arm: one row of `values_ST` per seed at the shared positions `x_T`."""

    x_T: Floats
    values_ST: Floats


def final_accuracy(analysis: Analysis) -> Drawing | None:
    """Every arm's outcome: its mean with interval, and each seed as a dot."""
    arms = analysis.finished_arms
    if not arms:
        return None
    metric = analysis.outcome.name

    def draw(figure: Figure) -> None:
        axes = _rows(figure, [arm.label for arm in arms])
        for row, arm in enumerate(arms):
            text = prose.number(arm.mean, metric)
            _estimate(axes, analysis, row, arm.label, arm.mean, arm.interval, list(arm.scores.values()), text)
        axes.set_xlabel(_axis_label(metric, analysis.outcome.label))

    title = f"{_sentence(analysis.outcome.label)} of each arm at the end of training"
    caption = "Large mark: mean over seeds; bar: 95 % interval; small dots: single seeds."
    return _drawing("final", title, caption, draw, _WIDE, _height([arm.label for arm in arms]))


def differences(analysis: Analysis) -> Drawing | None:
    """Every comparison with the baseline: the paired difference with interval and each seed's own difference."""
    comparisons = analysis.comparisons
    baseline = analysis.baseline
    if not comparisons or baseline is None:
        return None
    metric = analysis.outcome.name

    def draw(figure: Figure) -> None:
        axes = _rows(figure, [comparison.arm for comparison in comparisons])
        axes.axvline(0, color=INK, lw=0.8)
        for row, one in enumerate(comparisons):
            scores = analysis.arm(one.arm).scores
            seeds = [scores[seed] - baseline.scores[seed] for seed in one.seeds]
            text = prose.number(one.estimate, metric, signed=True)
            _estimate(axes, analysis, row, one.arm, one.estimate, one.interval, seeds, text)
        axes.set_xlabel("difference, points" if is_fraction(metric) else "difference")

    title = f"Difference to {_cut(baseline.label, 40)}, seed by seed"
    caption = "Large mark: mean paired difference; bar: 95 % interval; small dots: single seeds. Right of 0 is higher."
    return _drawing("differences", title, caption, draw, _WIDE, _height([comparison.arm for comparison in comparisons]))


def learning_curves(analysis: Analysis) -> list[Drawing]:
    """The study's metric against steps, rollouts, tokens and seconds."""
    metric = analysis.record.metric
    trials = curve_trials(analysis)
    axes_of_cost = [
        ("steps", None, "training steps"),
        ("rollouts", "train/rollouts", "sampled rollouts"),
        ("tokens", "train/generated_tokens", "generated tokens"),
        ("seconds", "seconds/total", "seconds"),
    ]
    drawings = []
    for name, cost, label in axes_of_cost:
        series = {arm: aligned(found, metric, cost) for arm, found in trials.items()}
        known = {arm: one for arm, one in series.items() if one is not None}
        if not known:
            continue
        caption = "Line: mean over seeds; band: lowest to highest seed."
        draw = _curves(analysis, known, _axis_label(metric, ""), label, markers=cost is None)
        title = f"{_sentence(metric.replace('/', ' ').replace('_', ' '))} against {label}"
        drawings.append(_drawing(f"learning_{name}", title, caption, draw, _WIDE, 2.7))
    return drawings


def dynamics(analysis: Analysis) -> list[Drawing]:
    """What happened inside the runs: one small figure per metric that any arm recorded."""
    trials = curve_trials(analysis)
    drawings = []
    for metric, title, unit in DYNAMICS:
        series = {arm: aligned(found, metric, None) for arm, found in trials.items()}
        known = {arm: smoothed(one) for arm, one in series.items() if one is not None}
        if known:
            draw = _curves(analysis, known, unit, "training steps", metric=metric)
            caption = "Line: mean over seeds; band: lowest to highest seed."
            drawings.append(_drawing(f"dynamics_{metric.replace('/', '_')}", title, caption, draw, _NARROW, 2.6))
    return drawings


def label_quality(analysis: Analysis) -> list[Drawing]:
    """For each arm that is paid by a majority vote: how often its labels are right, how clear the votes are."""
    right = (
        ("vote/label_accuracy", "majority label", PALETTE[0]),
        ("train/accuracy", "single rollouts", PALETTE[1]),
        ("validation/accuracy", "validation", PALETTE[2]),
    )
    votes = (
        ("vote/margin", "margin", PALETTE[0]),
        ("vote/false_positive_rate", "wrong, but rewarded", PALETTE[1]),
        ("vote/answered", "with an answer", PALETTE[2]),
    )
    trials = curve_trials(analysis)
    drawings = []
    for number, arm in enumerate(arm for arm in analysis.arms if _is_paid_by_vote(trials.get(arm.label, ()))):
        found = trials[arm.label]
        shown = _cut(arm.label, 40)
        for name, lines, title, unit, caption in (
            (
                f"labels_{number}",
                right,
                f"Are the majority labels right? {shown}",
                "% right",
                "A group's majority answer is its training label. Labels that stay above single rollouts can teach; "
                "falling lines under a rising reward are collapse.",
            ),
            (
                f"votes_{number}",
                votes,
                f"How clear are the votes? {shown}",
                "%",
                "Margin: votes of the first answer minus those of the second, over the group. Wrong, but rewarded: "
                "share of wrong completions that agree with the majority.",
            ),
        ):
            series = {line: aligned(found, metric, None) for metric, line, _ in lines}
            known = {line: one if line == "validation" else smoothed(one) for line, one in series.items() if one}
            if lines[0][1] not in known and lines is right:  # studies that did not record the votes themselves
                majority = aligned(found, "train/majority_accuracy", None)
                known |= {"majority label": smoothed(majority)} if majority else {}
            if lines[0][1] in known:
                colors = {line: color for _, line, color in lines}
                draw = _line_chart(known, {n: n for n in known}, colors, {}, 100.0, "training steps", unit)
                drawings.append(_drawing(name, title, caption, draw, _NARROW, 2.8))
    return drawings


def interactions(analysis: Analysis) -> list[Drawing]:
    """For each two factors of a grid: the outcome over one, a line per level of the other.

    At most six pairs, those with the smallest p first. Parallel lines do not interact.
    """
    grid = analysis.grid
    if grid is None or len(grid.factors) < 2:
        return []
    effects = {effect.factors: effect for effect in grid.effects}
    pairs = [(a, b) for i, a in enumerate(grid.factors) for b in grid.factors[i + 1 :]]
    pairs.sort(key=lambda pair: effects[pair].p if pair in effects else 1.0)
    drawings = []
    for number, pair in enumerate(pairs[:6]):
        levels = dict(zip(grid.factors, grid.levels, strict=True))
        across, lines = sorted(pair, key=lambda factor: -len(levels[factor]))
        if len(levels[lines]) > len(PALETTE):
            continue
        effect = effects.get(pair)
        found = "" if effect is None else f": {_interaction_found(effect.p_adjusted)}"
        title = f"{prose.factor_title((across, lines))}{found}"
        others = len(grid.factors) - 2
        caption = (
            f"{_sentence(analysis.outcome.label)} with its 95 % interval"
            f"{', averaged over the other ' + ('factor' if others == 1 else 'factors') if others else ''}. "
            "Parallel lines: the two can be chosen each on its own."
        )
        draw = _interaction(analysis, across, levels[across], lines, levels[lines])
        drawings.append(_drawing(f"interaction_{number}", title, caption, draw, _NARROW, 2.8))
    return drawings


def importances(analysis: Analysis) -> list[Drawing]:
    """How much of a search's first objective each parameter explains; none for a search with too few arms."""
    search = analysis.record.search
    if search is None or "tuning" in search or not search["importances"]["values"]:
        return []
    found = search["importances"]
    ranked = sorted(found["values"].items(), key=lambda item: -item[1])
    names = [short_path(name) for name, _ in ranked]
    shares = [100 * share for _, share in ranked]

    def draw(figure: Figure) -> None:
        axes = _rows(figure, names)
        axes.barh(range(len(shares)), shares, height=0.5, color=PALETTE[0])
        axes.set_xlim(0, None)
        for row, share in enumerate(shares):
            axes.text(1.03, row, f"{share:.0f}", transform=axes.get_yaxis_transform(), va="center", weight="bold")
        axes.set_xlabel("% of importance")

    first, *_ = search["objectives"]
    title = f"What {_cut(first.replace('/', ' ').replace('_', ' '), 40)} depends on"
    caption = f"Importance by {found['method']}, over the arms that the search finished."
    return [_drawing("importance_0", title, caption, draw, _WIDE, _height(names))]


def heat_maps(analysis: Analysis) -> list[Drawing]:
    """The outcome over two factors; for three, one map per level of the third (the one with the fewest levels)."""
    grid = analysis.grid
    if grid is None or len(grid.factors) not in (2, 3) or not analysis.finished_arms:
        return []
    means = [arm.mean for arm in analysis.finished_arms]
    bounds = (min(means), max(means))
    if len(grid.factors) == 2:
        return [_heat_map(analysis, grid.labels, grid.factors, grid.levels, bounds, "", 0)]
    last = min(range(3), key=lambda axis: len(grid.levels[axis]))
    kept = [axis for axis in range(3) if axis != last]
    maps = []
    for index, level in enumerate(grid.levels[last]):
        suffix = f", {short_path(grid.factors[last])} = {level}"
        labels = np.take(grid.labels, index, axis=last)
        factors, levels = [grid.factors[axis] for axis in kept], [grid.levels[axis] for axis in kept]
        maps.append(_heat_map(analysis, labels, factors, levels, bounds, suffix, index))
    return maps


def cost_against_accuracy(analysis: Analysis) -> list[Drawing]:
    """Each arm's outcome against what it cost, with the front of arms that no other beats in both."""
    drawings = []
    for key, label, unit in (
        ("seconds", "seconds per run", 1.0),
        ("generated_tokens", "generated tokens per run", 1.0),
        ("peak_memory_bytes", "peak memory, GiB", 2.0**30),
    ):
        arms = [arm for arm in analysis.finished_arms if key in arm.costs]
        spent = [arm.costs[key] for arm in arms]
        if len(arms) > 1 and max(spent) > 1.05 * min(spent):
            draw = _scatter(analysis, [(arm, arm.costs[key] / unit) for arm in arms], label)
            title = f"{_sentence(analysis.outcome.label)} against {label.partition(',')[0]}"
            caption = (
                "Mean over seeds with 95 % interval; up is more accurate, left is cheaper. Dashed: arms whose means no "
                "other arm beats in both."
            )
            drawings.append(_drawing(f"cost_{key}", title, caption, draw, _NARROW, 2.8))
    return drawings


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the (cost, value) points that no other matches in both and beats in one, cheapest first."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def curve_trials(analysis: Analysis) -> dict[str, list[TrialRecord]]:
    """Arm -> the trials that its curves show: the complete ones, or the unfinished ones while none is complete."""
    trials = [trial for trial in analysis.record.trials if trial.state == "complete"]
    if not trials:
        trials = [trial for trial in analysis.record.trials if trial.state in ("running", "stopped")]
    labels = [arm.label for arm in analysis.arms]
    chosen = {label: [trial for trial in trials if trial.arm == label] for label in labels}
    return {label: found for label, found in chosen.items() if found}


def aligned(trials: Sequence[TrialRecord], metric: str, cost: str | None) -> Series | None:
    """A metric of several seeds at shared positions: the steps that all have, or an even grid of a cumulative cost.

    Values that are not finite are left out. None where no seed has the metric, or two share no position.
    """
    curves = []
    for trial in trials:
        pairs = [(step, value) for step, value in trial.history.get(metric, ()) if math.isfinite(value)]
        if cost is not None and trial.history.get(cost):
            costs = np.array(trial.history[cost], dtype=float)
            position = np.searchsorted(costs[:, 0], [step for step, _ in pairs], side="right")
            spent = np.concatenate([[0.0], costs[:, 1]])[position]
            pairs = list(zip(spent, (value for _, value in pairs), strict=True))
        elif cost is not None:
            continue
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


def write_files(drawings: Sequence[Drawing], folder: Path, formats: Sequence[str] = FORMATS) -> None:
    """Each drawing as files of its name; those of an earlier report are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.suffix.lstrip(".") in FORMATS:
            old.unlink()
    for drawing in drawings:
        for suffix in formats:
            (folder / f"{drawing.name}.{suffix}").write_bytes(drawing.file(suffix))


def arm_colors(analysis: Analysis) -> dict[str, str]:
    """Arm label -> its colour in every figure."""
    return {arm.label: _color(analysis, arm.label) for arm in analysis.arms}


def _heat_map(
    analysis: Analysis,
    labels: np.ndarray,
    factors: Sequence[str],
    levels: Sequence[Sequence[Any]],
    bounds: tuple[float, float],
    suffix: str,
    index: int,
) -> Drawing:
    metric = analysis.outcome.name
    low, high = bounds
    colors = matplotlib.colormaps["Blues"]

    def draw(figure: Figure) -> None:
        axes = figure.add_axes((0.17, 0.15, 0.8, 0.69))
        for row, column in np.ndindex(labels.shape):
            arm = analysis.arm(str(labels[row, column]))
            position = 0.5 if high == low else (arm.mean - low) / (high - low)
            empty = math.isnan(arm.mean)
            color = "#f3f4f6" if empty else colors(0.08 + 0.8 * position)
            axes.add_patch(Rectangle((column - 0.485, row - 0.485), 0.97, 0.97, color=color, lw=0))
            ink = INK if empty or position < 0.6 else "white"
            value = "no result" if empty else prose.number(arm.mean, metric)
            axes.text(column, row - 0.1, value, ha="center", va="center", color=ink, weight="bold", size=9.5)
            bounds_text = prose.limits(arm.interval, metric).strip("[]").replace(", ", " to ")
            axes.text(column, row + 0.2, bounds_text, ha="center", va="center", color=ink, size=7)
        axes.set_xlim(-0.5, labels.shape[1] - 0.5)
        axes.set_ylim(labels.shape[0] - 0.5, -0.5)
        axes.set_xticks(range(labels.shape[1]), [_cut(str(level), 12) for level in levels[1]])
        axes.set_yticks(range(labels.shape[0]), [_cut(str(level), 10) for level in levels[0]])
        axes.set_xlabel(short_path(factors[1]))
        axes.set_ylabel(short_path(factors[0]))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)

    unit = " (%)" if analysis.outcome.is_fraction else ""
    title = f"{_sentence(analysis.outcome.label)}{unit}{suffix or f' by {prose.factor_title(factors)}'}"
    caption = "Mean over seeds with its 95 % interval; darker is higher."
    return _drawing(f"heat_{index}", title, caption, draw, _WIDE, 1.1 + 0.62 * labels.shape[0])


def _scatter(analysis: Analysis, costs: Sequence[tuple[ArmSummary, float]], label: str) -> Callable[[Figure], None]:
    scale = _scale(analysis.outcome.name)

    def draw(figure: Figure) -> None:
        axes = figure.add_axes(_PLOT)
        ends = []
        front = pareto_front([(cost, arm.mean) for arm, cost in costs])
        steps = [(costs[i][1], scale * costs[i][0].mean) for i in front]
        axes.step(*zip(*steps, strict=True), where="post", color=MUTED, lw=0.9, ls=(0, (4, 3)), zorder=1)
        for arm, cost in costs:
            color = _color(analysis, arm.label)
            if arm.interval is not None:
                ends_of_bar = [scale * arm.interval.low, scale * arm.interval.high]
                axes.plot([cost, cost], ends_of_bar, color=color, lw=1.4, alpha=0.6)
            _mark(axes, analysis, arm.label, cost, scale * arm.mean)
            if color != GREY:
                ends.append((scale * arm.mean, _end_label(analysis, arm.label), color))
        axes.margins(x=0.12, y=0.1)
        axes.set_xlabel(label)
        _unit(axes, _axis_label(analysis.outcome.name, ""))
        _tidy(axes)
        _label_ends(axes, ends)

    return draw


def _interaction(
    analysis: Analysis, across: str, positions: Sequence[Any], lines: str, levels: Sequence[Any]
) -> Callable[[Figure], None]:
    metric = analysis.outcome.name
    scale = _scale(metric)

    def draw(figure: Figure) -> None:
        axes = figure.add_axes(_PLOT)
        ends = []
        for number, level in enumerate(levels):
            color, mean = PALETTE[number], math.nan
            shift = 0.05 * (number - (len(levels) - 1) / 2)  # so that intervals do not hide each other
            points = []
            for place, position in enumerate(positions):
                found = marginal(analysis, {across: position, lines: level})
                if found is None:
                    continue
                mean = scale * found.estimate
                points.append((place + shift, mean))
                if found.interval is not None:
                    limits = [scale * found.interval.low, scale * found.interval.high]
                    axes.plot([place + shift] * 2, limits, color=color, lw=1.2, alpha=0.55)
            if points:
                axes.plot(*zip(*points, strict=True), color=color, lw=1.7, marker=MARKERS[number], ms=5, mec="white")
                ends.append((mean, f"{short_path(lines)} {_cut(str(level), 14)}", color))
        axes.set_xlim(-0.3, len(positions) - 0.7)
        axes.set_xlabel(short_path(across))
        _unit(axes, _axis_label(metric, ""))
        _tidy(axes)
        axes.set_xticks(range(len(positions)), [_cut(str(position), 12) for position in positions])
        _label_ends(axes, ends)

    return draw


def _interaction_found(p: float) -> str:
    if math.isnan(p):
        return "no test possible"
    text = prose.p_value(p)
    found = "they interact" if p < ALPHA else "no interaction detected"
    return f"{found} (p\u00a0{'' if text[0] == '<' else '= '}{text})".replace("= ", "=\u00a0")


def _is_paid_by_vote(trials: Sequence[TrialRecord]) -> bool:
    return any(setting(trial.spec, "rewards.majority_vote.weight") for trial in trials)


def _curves(
    analysis: Analysis,
    series: Mapping[str, Series],
    y_label: str,
    x_label: str,
    *,
    metric: str | None = None,
    markers: bool = False,
) -> Callable[[Figure], None]:
    colors = {arm: _color(analysis, arm) for arm in series}
    marks = {arm: _marker(analysis, arm) for arm in series} if markers else {}
    names = {arm: _end_label(analysis, arm) for arm in series}
    return _line_chart(series, names, colors, marks, _scale(metric or analysis.record.metric), x_label, y_label)


def _line_chart(
    series: Mapping[str, Series],
    names: Mapping[str, str],
    colors: Mapping[str, str],
    marks: Mapping[str, str],
    scale: float,
    x_label: str,
    y_label: str,
) -> Callable[[Figure], None]:
    def draw(figure: Figure) -> None:
        axes = figure.add_axes(_PLOT)
        _draw_lines(axes, series, names, colors, marks, scale)
        axes.set_xlabel(x_label)
        _unit(axes, y_label)

    return draw


def _draw_lines(
    axes: Axes,
    series: Mapping[str, Series],
    names: Mapping[str, str],
    colors: Mapping[str, str],
    marks: Mapping[str, str],
    scale: float,
) -> None:
    ends = []
    for name, one in sorted(series.items(), key=lambda item: colors[item[0]] != GREY):
        color, values = colors[name], scale * one.values_ST
        grey = color == GREY
        if len(values) > 1 and not grey:
            axes.fill_between(one.x_T, values.min(axis=0), values.max(axis=0), color=color, alpha=0.16, lw=0)
        mean = values.mean(axis=0)
        axes.plot(
            one.x_T,
            mean,
            color=color,
            lw=0.9 if grey else 1.7,
            marker=None if grey else marks.get(name),
            ms=3.4,
            markevery=max(1, one.x_T.size // 8),
            solid_capstyle="round",
        )
        if not grey:
            ends.append((float(mean[-1]), names[name], color))
    _tidy(axes)
    _label_ends(axes, ends)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names beside the right end of their lines, pushed apart so that none covers another."""
    low, high = axes.get_ylim()
    unit = 10 / (axes.get_window_extent().height * 72 / axes.figure.dpi) * (high - low)
    placed = []
    bottom = -math.inf
    for value, name, color in sorted(ends):
        lines = _wrapped(name, int(3.2 * axes.figure.bbox.width / axes.figure.dpi), 4)
        half = 0.5 * unit * len(lines)
        center = max(value, bottom + half)
        bottom = center + half
        placed.append([center, half, "\n".join(lines), color])
    overflow = max(0.0, bottom - high)
    ceiling = math.inf
    for item in reversed(placed):
        item[0] = min(item[0], ceiling - item[1]) if ceiling < math.inf else item[0] - overflow
        ceiling = item[0] - item[1]
    for center, _, text, color in placed:
        shown = {"color": color, "va": "center", "size": 7.5, "weight": "bold", "linespacing": 1.05}
        axes.text(1.02, center, text, transform=axes.get_yaxis_transform(), **shown)


def _estimate(
    axes: Axes,
    analysis: Analysis,
    row: int,
    label: str,
    estimate: float,
    interval: Interval | None,
    seeds: Sequence[float],
    text: str,
) -> None:
    """One row: the seeds as dots, the interval as a bar, the estimate as a mark with its number at the right."""
    color, scale = _color(analysis, label), _scale(analysis.outcome.name)
    axes.plot(scale * np.array(seeds), np.full(len(seeds), row + 0.24), "o", color=color, ms=3.2, alpha=0.65, mew=0)
    if interval is not None:
        ends = [scale * interval.low, scale * interval.high]
        axes.plot(ends, [row, row], color=color, lw=2.2, solid_capstyle="round")
    _mark(axes, analysis, label, scale * estimate, row)
    axes.text(1.03, row, text, transform=axes.get_yaxis_transform(), va="center", weight="bold")


def _mark(axes: Axes, analysis: Analysis, label: str, x: float, y: float) -> None:
    axes.plot([x], [y], _marker(analysis, label), color=_color(analysis, label), ms=6.5, mec="white", mew=0.8)


def _rows(figure: Figure, labels: Sequence[str]) -> Axes:
    """Axes with one horizontal row per label, the first on top, and room for a number at the right."""
    height = figure.get_size_inches()[1]
    left = 0.05 + min(0.0175 * max(len(line) for label in labels for line in _wrapped(label, 22, 3)), 0.34)
    axes = figure.add_axes((left, 0.5 / height, 0.89 - left, 1 - 0.95 / height))
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_yticks(range(len(labels)), ["\n".join(_wrapped(label, 22, 3)) for label in labels])
    axes.tick_params(axis="y", labelcolor=INK, labelsize=7.5)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    return axes


def _unit(axes: Axes, text: str) -> None:
    """The unit of the y axis, written flat above its highest tick."""
    axes.annotate(text, (0, 1), (-18, 6), xycoords="axes fraction", textcoords="offset points", color=MUTED, size=8)


def _tidy(axes: Axes) -> None:
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if low == high == 0:
        axes.set_ylim(-0.03, 1)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=_STEPS))
    if axes.get_xlim()[1] >= 1e4:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _thousands(value)))


def _thousands(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value else "0"


def _drawing(
    name: str, title: str, caption: str, draw: Callable[[Figure], None], width: float, height: float
) -> Drawing:
    with matplotlib.rc_context(_FRESH_STYLE):
        lines = textwrap.wrap(title, int(13.2 * width)) or [title]
        figure = Figure(figsize=(width, height))
        FigureCanvasAgg(figure)
        draw(figure)
        for axes in figure.axes:
            box = axes.get_position()
            axes.set_position((box.x0, box.y0, box.width, box.height - 0.16 * (len(lines) - 1) / height))
        figure.text(0, 1 - 0.06 / height, "\n".join(lines), va="top", weight="bold", size=9.5, linespacing=1.15)
        svg = _saved(figure, "svg").decode("utf-8")
    return Drawing(name, title, caption, _inline(svg, name, f"{title}. {caption}".strip()), figure)


def _saved(figure: Figure, suffix: str) -> bytes:
    """The figure in a format, without the time at which it was made."""
    unwanted = {"svg": ("Date", "Creator", "Format", "Type"), "png": ("Software",), "pdf": ("CreationDate", "Producer")}
    options: dict[str, Any] = {"transparent": True} if suffix == "svg" else {"facecolor": "white"}
    content = io.BytesIO()
    figure.savefig(content, format=suffix, dpi=150, metadata=dict.fromkeys(unwanted[suffix]), **options)
    return content.getvalue()


def _inline(svg: str, name: str, description: str) -> str:
    """The SVG element alone, sized by its page, with ids of its own and a description for screen readers."""
    body = svg[svg.index("<svg") :].strip()
    body = re.sub(r' id="([^"]+)"', rf' id="{name}-\1"', body)
    body = re.sub(r'(href="|url\()#', rf"\1#{name}-", body)
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    head, _, rest = body.partition(">")
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{escape(description)}">{rest}'


def _color(analysis: Analysis, label: str) -> str:
    return PALETTE[place] if (place := _place(analysis, label)) is not None else GREY


def _marker(analysis: Analysis, label: str) -> str:
    return MARKERS[place] if (place := _place(analysis, label)) is not None else "o"


def _end_label(analysis: Analysis, label: str) -> str:
    """An arm's name beside its line; among many arms its role, as the table names the coloured arms."""
    if len(analysis.arms) <= len(PALETTE):
        return label
    place = _place(analysis, label)
    if place is None:
        return ""
    if label == analysis.record.baseline:
        return "baseline"
    return "highest arm" if label == max(analysis.finished_arms, key=_mean).label else "lowest arm"


def _place(analysis: Analysis, label: str) -> int | None:
    """Position of an arm in the palette; None for an arm in the grey background."""
    labels = [arm.label for arm in analysis.arms]
    if len(labels) > len(PALETTE):
        finished = sorted(analysis.finished_arms, key=_mean)
        extremes = [arm.label for arm in (finished[-1:] + finished[:1])]
        labels = list(dict.fromkeys([analysis.record.baseline, *extremes]))
    return labels.index(label) if label in labels else None


def _mean(arm: ArmSummary) -> float:
    return arm.mean


def _scale(metric: str) -> float:
    return 100.0 if is_fraction(metric) else 1.0


def _axis_label(metric: str, label: str) -> str:
    if not is_fraction(metric):
        return label
    return f"{label}, %" if label else "%"


def _height(labels: Sequence[str]) -> float:
    """Inches for one row per label, whose height follows the label with most lines."""
    most = max(len(_wrapped(label, 22, 3)) for label in labels)
    return 1.05 + (0.12 + 0.15 * max(most, 2)) * max(len(labels), 2)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _wrapped(label: str, width: int, most: int) -> list[str]:
    """A label in at most `most` lines, broken at spaces, or after `_` where a word is wider than a line."""
    words = [part for word in label.split() for part in ([word] if len(word) <= width else _parts(word, width))]
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    lines = [_cut(line, width + 3) for line in lines if line] or [label]
    return lines if len(lines) <= most else [*lines[: most - 1], _cut(" ".join(lines[most - 1 :]), width)]


def _parts(word: str, width: int) -> list[str]:
    """A long word in pieces that end in `_` or `=` where one is in reach."""
    parts = [""]
    for piece in re.findall(rf"[^_=]{{0,{width - 1}}}[_=]?", word):
        if parts[-1] and len(parts[-1]) + len(piece) > width:
            parts.append("")
        parts[-1] += piece
    return parts
