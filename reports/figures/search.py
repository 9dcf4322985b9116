"""Draws a search: the importance of its settings, the best arm so far, and its arms against each setting."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator

from ...harness.data import short_path
from ..analysis import Analysis
from ..prose import wording
from ..trials import search_of, tuning_of
from . import style
from .style import Drawing, End, axis_label, chart, color_of, cut, drawn, scale_of

_MOST_LEVELS = 6
_LOGARITHMIC = 20  # largest value over smallest from which on a scale is logarithmic


def importances(analysis: Analysis) -> list[Drawing]:
    """The importance of each parameter for a search's first objective; empty for a search with too few arms."""
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

    title = f"What {cut(wording.spoken(next(iter(search['objectives']))), 40)} depends on"
    caption = f"Importance by {found['method']}, over the arms that the search finished."
    return [style.row_chart("importance_0", title, caption, names, plot)]


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


def slices(analysis: Analysis) -> list[Drawing]:
    """The first objective of every arm of a search against one setting, for each setting, the most important first."""
    caption, drawings = "A dot per arm; bar: mean of the arms at a level.", []
    for number, (name, search) in enumerate(_searches(analysis).items()):
        metric, importance = next(iter(search["objectives"])), search["importances"]["values"]
        arms = [arm for arm in search["arms"] if _is_known(arm, metric)]
        if len(arms) < 2:
            continue
        shared = [path for path in arms[0]["parameters"] if all(path in arm["parameters"] for arm in arms)]
        values = [scale_of(metric) * arm["values"][metric] for arm in arms]
        of = f" of {cut(name, 40)}" if name else ""
        for place, path in enumerate(sorted(shared, key=lambda path: -importance.get(path, 0.0))):
            title = f"{wording.capitalised(wording.spoken(metric))} against {short_path(path)}{of}"
            plot = partial(_slice, [arm["parameters"][path] for arm in arms], values)
            draw = chart(plot, cut(path, 50), axis_label(metric))
            drawings.append(drawn(f"slice_{number}_{place}", title, caption, draw, style.NARROW, 2.6))
    return drawings


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
        axes.set_xticks(range(len(names)), [cut(wording.short(level), 48 // len(names)) for level in levels])
    axes.set_position((0.11, 0.19, 0.84, 0.62))  # no line has a name at its end
    axes.scatter(places, values, s=20, color=style.PALETTE[0], alpha=0.6, linewidths=0, zorder=2)
    return []


def _is_known(arm: Mapping[str, Any], metric: str) -> bool:
    return math.isfinite(arm["values"].get(metric, math.nan))


def _searches(analysis: Analysis) -> Mapping[str, Mapping[str, Any]]:
    """Tuned arm -> its search, or the study's own search under an empty name."""
    search = search_of(analysis.record)
    return tuning_of(analysis.record) or ({"": search} if search is not None else {})
