"""Decides how fitted curves of accuracy against compute are drawn: points, curve, and what lies beyond the data."""

import numpy as np
from matplotlib.figure import Figure

from ..analysis import Analysis
from ..prose import wording
from ..scaling import Scalings, curve
from .axes import PLOT, cut, label_ends, tidy, write_unit
from .style import GREY, WIDE, Drawing, color_of, drawn, end_label, marker_of

_CAPTION = "Marks: mean over seeds; line: fitted curve, dotted beyond the data; thin line: its ceiling."


def scaling_curves(analysis: Analysis, found: Scalings | None) -> list[Drawing]:
    """The curves that are fitted."""
    if found is None or not found.fits:
        return []
    end = 1.4 * max(float(one.costs_ST.mean(axis=0)[-1]) for one in found.fits)

    def draw(figure: Figure) -> None:
        axes = figure.add_axes(PLOT)
        ends = []
        for one in sorted(found.fits, key=lambda fit: color_of(analysis, fit.arm) != GREY):
            color, costs = color_of(analysis, one.arm), one.costs_ST.mean(axis=0)
            known, beyond = np.linspace(0, costs[-1], 120), np.linspace(costs[-1], end, 60)
            axes.plot(known, 100 * curve(one.parameters, known), color=color, lw=1.7)
            axes.plot(beyond, 100 * curve(one.parameters, beyond), color=color, lw=1.4, ls=":")
            if color != GREY:
                marks = {"color": color, "marker": marker_of(analysis, one.arm), "ms": 3.2, "ls": "", "alpha": 0.75}
                axes.plot(costs, 100 * one.scores_ST.mean(axis=0), **marks)
                axes.axhline(100 * one.ceiling.estimate, color=color, lw=0.6, alpha=0.7)
                last = float(100 * curve(one.parameters, np.array([end]))[0])
                ends.append((last, end_label(analysis, one.arm), color))
        axes.set_xlim(0, end)
        tidy(axes)
        label_ends(axes, ends)
        axes.set_xlabel(found.cost)
        write_unit(axes, "%")

    title = f"{wording.capitalised(wording.spoken(analysis.record.metric))} against {found.cost}: fitted curves"
    return [drawn("scaling", cut(title, 120), _CAPTION, draw, WIDE, 2.9)]
