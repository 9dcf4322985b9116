"""Decides how capability is drawn: pass@k against k and Cover@tau against tau, before and after training."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from ..analysis import Analysis
from ..capability import Capabilities, Capability, table_sizes
from ..statistics import Floats, Interval
from .axes import PLOT, label_ends, tidy, write_unit
from .style import GREY, MUTED, WIDE, Draw, Drawing, color_of, drawn, end_label

_CAPTION = "Line: mean over seeds and problems; band: 95 % interval; dashed: before training."


class _Curve(NamedTuple):
    """`low_X` and `high_X` are NaN without an interval."""

    name: str
    color: str
    is_start: bool
    x_X: Floats
    mean_X: Floats
    low_X: Floats
    high_X: Floats


def capability_curves(analysis: Analysis, found: Capabilities | None) -> list[Drawing]:
    """pass@k and Cover@tau of every arm."""
    if found is None:
        return []
    most = max(one.num_samples for one in found.after.values())
    sizes = np.unique(np.geomspace(1, most, 50).round()).astype(int)
    taus = np.linspace(0, 1, 41)[1:]
    passes = [_curve(analysis, one, start, sizes[sizes <= one.num_samples], _pass_at) for one, start in _all(found)]
    covers = [_curve(analysis, one, start, taus, _cover_at) for one, start in _all(found)]
    return [
        drawn("pass_at_k", "pass@k of the test problems", _CAPTION, _chart(passes, "k samples", most), WIDE, 2.9),
        drawn("cover_at_tau", "Cover@tau: problems solved at least this often", _CAPTION,
              _chart(covers, "tau, % of a problem's samples that are right"), WIDE, 2.9),
    ]  # fmt: skip


def _all(found: Capabilities) -> list[tuple[Capability, bool]]:
    return [*((one, True) for one in found.before), *((one, False) for one in found.after.values())]


def _pass_at(one: Capability, k: float) -> tuple[float, Interval | None]:
    return float(one.passes(int(k)).mean()), one.pass_at(int(k))


def _cover_at(one: Capability, tau: float) -> tuple[float, Interval | None]:
    return float(one.covers(tau).mean()), one.cover_at(tau)


def _curve(
    analysis: Analysis,
    one: Capability,
    is_start: bool,
    x_X: Floats,
    read: Callable[[Capability, float], tuple[float, Interval | None]],
) -> _Curve:
    points = [read(one, float(x)) for x in x_X]
    limits = [(np.nan, np.nan) if interval is None else (interval.low, interval.high) for _, interval in points]
    known = [arm.label for arm in analysis.arms]
    color = color_of(analysis, one.label) if one.label in known else MUTED
    name = "before training" if is_start else end_label(analysis, one.label)
    mean, limits_X2 = np.array([value for value, _ in points]), np.array(limits)
    return _Curve(name, color, is_start, np.asarray(x_X, float), mean, limits_X2[:, 0], limits_X2[:, 1])


def _chart(curves: Sequence[_Curve], x_label: str, most: int | None = None) -> Draw:
    """With `most` the x axis is logarithmic and ends there, without it is a fraction in percent."""

    def draw(figure: Figure) -> None:
        axes = figure.add_axes(PLOT)
        unit, ends, starts = (1.0 if most else 100.0), [], sum(one.is_start for one in curves)
        for one in sorted(curves, key=lambda curve: curve.color != GREY):
            x, is_grey = unit * one.x_X, one.color == GREY
            if not is_grey:
                axes.fill_between(x, 100 * one.low_X, 100 * one.high_X, color=one.color, alpha=0.14, lw=0)
                if not one.is_start or starts == 1:
                    ends.append((100 * float(one.mean_X[-1]), one.name, one.color))
            axes.plot(
                x, 100 * one.mean_X, color=one.color, lw=0.9 if is_grey else 1.7, ls="--" if one.is_start else "-"
            )
        tidy(axes)
        if most:
            axes.set_xscale("log")
            axes.minorticks_off()
            axes.set_xticks(table_sizes(most), [f"{k}" for k in table_sizes(most)])
        label_ends(axes, ends)
        axes.set_xlabel(x_label)
        write_unit(axes, "%")

    return draw
