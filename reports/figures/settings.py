"""Draws settings against their results: parallel coordinates, slices, the best value of a search so far.

A grid shows the outcome of its arms, a search its first objective. Colour follows the value, except in a grid without
a detected effect: noise has no colour.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from ...harness.data import short_path
from ..analysis import Analysis
from ..prose import wording
from ..statistics import ALPHA
from ..trials import search_of, tuning_of
from . import style
from .style import Drawing, End, axis_label, chart, color_of, cut, drawn, scale_of

_MOST_SETTINGS, _MOST_LEVELS = 6, 6
_LOGARITHMIC = 20  # largest value over smallest from which on a scale is logarithmic
_Axis = tuple[list[float], list[tuple[float, str]]]  # places of the arms and ticks (place, label), all in [0, 1]


@dataclass(frozen=True)
class _Space:
    """The arms that have a value, in the study's order.

    of        which of several searches, at the end of a title
    values_M  metric -> value of each arm, as it is shown; colour and slices are those of the first metric
    shade     the meaning of a stronger colour; empty if values have no colour
    left_out  a sentence on the arms without a value
    """

    of: str
    settings: Sequence[str]
    parameters: Sequence[Mapping[str, Any]]
    values_M: Mapping[str, Sequence[float]]
    shade: str
    left_out: str

    @property
    def metric(self) -> str:
        return next(iter(self.values_M))

    @property
    def alphas(self) -> list[float]:
        """The opacity of each arm's colour: better arms are stronger."""
        sign = {"higher": 1, "lower": -1}.get(self.shade, 0)
        values = [sign * value for value in self.values_M[self.metric]]
        low, high = min(values), max(values)
        return [0.3 + 0.7 * (value - low) / (high - low) if high > low else 0.55 for value in values]


def parallel_coordinates(analysis: Analysis) -> list[Drawing]:
    """A line per arm through its settings to its value."""
    drawings = []
    for number, space in enumerate(_spaces(analysis)):
        shown = space.settings[:_MOST_SETTINGS]
        title = f"Settings{space.of} and {wording.spoken(space.metric)}, in parallel coordinates"
        none = "one colour, as no effect of the grid is detected"
        shade = f"stronger colour is {space.shade}" if space.shade else none
        most = f" {len(shown)} of {len(space.settings)} settings, by importance." if shown != space.settings else ""
        caption, draw = f"A line per arm; {shade}.{most} {space.left_out}".strip(), partial(_parallel, space, shown)
        drawings.append(drawn(f"parallel_{number}", title, caption, draw, style.WIDE, 3.1))
    return drawings


def slices(analysis: Analysis) -> list[Drawing]:
    """The value of every arm against one setting, for each setting."""
    caption, drawings = "A dot per arm; bar: mean of the arms at a level.", []
    for number, space in enumerate(_spaces(analysis)):
        for place, path in enumerate(space.settings):
            title = f"{wording.capitalised(wording.spoken(space.metric))} against {short_path(path)}{space.of}"
            draw = chart(partial(_slice, space, path), cut(path, 50), axis_label(space.metric))
            drawings.append(drawn(f"slice_{number}_{place}", title, caption, draw, style.NARROW, 2.6))
    return drawings


def best_so_far(analysis: Analysis) -> list[Drawing]:
    """The best value after each arm of a search, or of each tuned arm's search; empty for several objectives."""
    searches = _searches(analysis)
    if not searches or len(objectives := next(iter(searches.values()))["objectives"]) > 1:
        return []
    ((metric, direction),) = objectives.items()
    choose, best = (min, "lowest") if direction == "minimize" else (max, "highest")
    known: dict[str, list[tuple[int, float]]] = {}
    for name, search in searches.items():
        for number, arm in enumerate(search["arms"], 1):
            if _is_known(arm, metric):
                known.setdefault(name, []).append((number, scale_of(metric) * arm["values"][metric]))
    if not known:
        return []

    def plot(axes: Axes) -> list[End]:
        ends = []
        for name, found in known.items():
            color, (numbers, values) = color_of(analysis, name) if name else style.PALETTE[0], zip(*found, strict=True)
            bests = list(accumulate(values, choose))
            axes.plot(numbers, values, "o", color=color, ms=3.2, alpha=0.6, mew=0)
            steps = [*numbers, len(searches[name]["arms"])], [*bests, bests[-1]]
            axes.step(*steps, where="post", color=color, lw=1.7)
            ends.append((bests[-1], name or wording.number(bests[-1] / scale_of(metric), metric), color))
        return ends

    title = f"{wording.capitalised(wording.spoken(metric))}: the best arm so far"
    caption = f"Dot: an arm, mean over seeds; line: the {best} so far. Arms without a value have no dot."
    return [drawn("best_so_far", title, caption, chart(plot, "arms proposed", axis_label(metric)), style.WIDE, 2.7)]


def _spaces(analysis: Analysis) -> Iterator[_Space]:
    """The grid, the search, or the search of every tuned arm; only those with more than one arm that has a value."""
    grid, known = analysis.grid, [arm for arm in analysis.arms if arm.factors]
    if grid is not None and len(grid.factors) > 1 and len(arms := [arm for arm in known if arm.scores]) > 1:
        values = {analysis.outcome.name: [scale_of(analysis.outcome.name) * arm.mean for arm in arms]}
        missing = len(known) - len(arms)
        left_out = f"Left out: {wording.plural(missing, 'arm')} without a result." if missing else ""
        shade = "higher" if any(effect.p_adjusted < ALPHA for effect in grid.effects) else ""
        yield _Space("", grid.factors, [arm.factors for arm in arms], values, shade, left_out)
    for name, search in _searches(analysis).items():
        objectives = search["objectives"]
        arms = [arm for arm in search["arms"] if all(_is_known(arm, metric) for metric in objectives)]
        parameters = [arm["parameters"] for arm in arms]
        shared = [path for path in (parameters or [{}])[0] if all(path in one for one in parameters)]
        if len(arms) < 2 or not shared:
            continue
        others = Counter(arm["state"] for arm in search["arms"] if arm not in arms)
        left_out = f"Left out: {', '.join(f'{count} {state}' for state, count in others.items())}." if others else ""
        importance = search["importances"]["values"]
        settings = sorted(shared, key=lambda path: -importance.get(path, 0.0))
        values = {metric: [scale_of(metric) * arm["values"][metric] for arm in arms] for metric in objectives}
        shade = "lower" if next(iter(objectives.values())) == "minimize" else "higher"
        yield _Space(f" of {cut(name, 40)}" if name else "", settings, parameters, values, shade, left_out)


def _is_known(arm: Mapping[str, Any], metric: str) -> bool:
    return math.isfinite(arm["values"].get(metric, math.nan))


def _searches(analysis: Analysis) -> Mapping[str, Mapping[str, Any]]:
    """Tuned arm -> its search, or the study's own search under an empty name."""
    search = search_of(analysis.record)
    return tuning_of(analysis.record) or ({"": search} if search is not None else {})


def _parallel(space: _Space, settings: Sequence[str], figure: Figure) -> None:
    axes_A = {short_path(path): _axis_of([one[path] for one in space.parameters]) for path in settings}
    axes_A |= {axis_label(metric, wording.spoken(metric)): _axis_of(v) for metric, v in space.values_M.items()}
    places = [_spread(places, space.values_M[space.metric]) for places, _ in axes_A.values()]
    alphas, right = space.alphas, len(axes_A) - 1
    axes = figure.add_axes((0.11, 0.24, 0.79, 0.6))
    axes.set_axis_off()
    axes.set_xlim(0, right)
    axes.set_ylim(0, 1)
    for arm in sorted(range(len(alphas)), key=lambda arm: alphas[arm]):
        line = {"color": style.PALETTE[0], "alpha": alphas[arm], "lw": 1.4 if len(alphas) <= 40 else 0.9}
        axes.plot([one[arm] for one in places], **line, clip_on=False, zorder=2)
    for place, (name, (_, ticks)) in enumerate(axes_A.items()):
        axes.axvline(place, color=style.MUTED, lw=0.8, clip_on=False, zorder=1)
        box = {"facecolor": "white", "alpha": 0.8, "pad": 0.8, "lw": 0}
        side, align = (-4, "right") if place < right else (4, "left")
        shown = {"textcoords": "offset points", "ha": align, "va": "center", "size": 7.5, "zorder": 3, "bbox": box}
        for height, label in ticks:
            axes.annotate(cut(label, 12), (place, height), (side, 0), color=style.MUTED, **shown)
        align, shift = {0: ("left", -26), right: ("right", 28)}.get(place, ("center", 0))
        lower = 22 if right > 4 and place % 2 else 0  # neighbours share the width, one above the other
        below = {"textcoords": "offset points", "va": "top", "size": 7.5, "weight": "bold"}
        text = "\n".join(style.wrapped(name, 84 // len(axes_A), 2))
        axes.annotate(text, (place, 0), (shift, -7 - lower), ha=align, **below)


def _slice(space: _Space, path: str, axes: Axes) -> list[End]:
    places, ticks = _axis_of([one[path] for one in space.parameters])
    values = space.values_M[space.metric]
    for place in set(places):
        at = [value for value, one in zip(values, places, strict=True) if one == place]
        if len(at) > 1:
            axes.plot([place - 0.05, place + 0.05], [fmean(at)] * 2, color=style.MUTED, lw=1.6)
    dots: dict[str, Any] = {"s": 20, "c": style.PALETTE[0], "alpha": space.alphas, "linewidths": 0, "zorder": 2}
    axes.scatter(places, values, **dots)
    axes.set_position((0.11, 0.19, 0.84, 0.62))
    axes.set_xlim(-0.1, 1.1)
    axes.set_xticks([place for place, _ in ticks], [cut(label, 48 // len(ticks)) for _, label in ticks])
    return []


def _axis_of(values: Sequence[Any]) -> _Axis:
    """Numbers that rarely repeat on a scale, which is logarithmic if they span much; others as levels side by side."""
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    distinct = list({str(value): value for value in values}.values())
    if not are_numbers or len(distinct) < min(len(values), _MOST_LEVELS + 1):
        order = [str(value) for value in (sorted(distinct) if are_numbers else distinct)]
        centres = {text: (level + 0.5) / len(order) for level, text in enumerate(order)}
        shown = {str(value): wording.short(value) for value in distinct}
        return [centres[str(value)] for value in values], [(centres[text], shown[text]) for text in order]
    low, high = min(values), max(values)
    is_log = low > 0 and high / low >= _LOGARITHMIC
    locator = LogLocator(subs=(1.0, 3.0)) if is_log else MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])

    def place(value: float) -> float:
        if low == high:
            return 0.5
        return math.log(value / low) / math.log(high / low) if is_log else (value - low) / (high - low)

    marks = [float(mark) for mark in locator.tick_values(low, high) if low <= mark <= high] or [low]
    return [place(value) for value in values], [(place(mark), wording.short(mark)) for mark in marks]


def _spread(places: Sequence[float], values: Sequence[float]) -> list[float]:
    """Places at which arms of one level lie above each other in the order of their values, so that lines can be told
    apart."""
    found, room = list(places), 0.7 / len(set(places))
    for place in set(places):
        at = sorted((arm for arm, one in enumerate(places) if one == place), key=lambda arm: values[arm])
        for rank, arm in enumerate(at):
            found[arm] += room * (rank / (len(at) - 1) - 0.5) if len(at) > 1 else 0.0
    return found
