"""The section of a report with the fitted curves: ceiling, speed, and the arms that have none."""

import numpy as np
from matplotlib.axes import Axes

from ....reports.analysis import Analysis
from ....reports.figures import style
from ....reports.figures.style import Drawing, End, chart, color_of, drawn, look
from ....reports.prose import wording
from ....reports.section import ReportSection
from ....reports.tables import LIMITS, Table, interval_texts, range_texts, table
from .fits import Scalings, curve, scalings

_CAPTION = "Marks: mean over seeds; line: fitted curve, dotted beyond the data; thin line: its ceiling."
_CHECK = (
    "The check fits only the first half of compute and states predicted minus measured accuracy in the second half, in "
    "points, with an interval over seeds: it holds if that interval contains 0. Differences to the baseline are paired "
    "by seed and not corrected for several arms."
)


def section(analysis: Analysis) -> ReportSection | None:
    """The fitted curves, if the tokens are known and the metric is a fraction."""
    found = scalings(analysis)
    if found is None:
        return None
    metric, (fitted, refused) = wording.spoken(analysis.record.metric), tables(analysis, found)
    lead = (
        f"A saturating curve of the {metric} against generated tokens (ScaleRL, arXiv:2510.13786): its ceiling if "
        "training continued, and the compute that reaches half of the gain. Student's intervals over seeds, for these "
        "validation problems and this form of curve. Only curves that the data identify are shown."
    )
    shown = [("figures", curves(analysis, found)), ("table", fitted), ("note", _CHECK)] if fitted else []
    parts = [("lead", lead), *shown, ("table", refused)]
    return ReportSection("scaling", "Scaling: ceiling and speed", parts, "Scaling") if fitted or refused else None


def curves(analysis: Analysis, found: Scalings) -> list[Drawing]:
    """The fitted curves of accuracy against compute: points, curve, and what lies beyond the data."""
    if not found.fits:
        return []
    end = 1.4 * max(float(one.costs_ST.mean(axis=0)[-1]) for one in found.fits)

    def plot(axes: Axes) -> list[End]:
        ends = []
        for one in sorted(found.fits, key=lambda fit: color_of(analysis, fit.arm) != style.GREY):
            (color, marker), costs = look(analysis, one.arm), one.costs_ST.mean(axis=0)
            known, beyond = np.linspace(0, costs[-1], 120), np.linspace(costs[-1], end, 60)
            axes.plot(known, 100 * curve(one.parameters, known), color=color, lw=1.7)
            axes.plot(beyond, 100 * curve(one.parameters, beyond), color=color, lw=1.4, ls=":")
            if color != style.GREY:
                axes.plot(costs, 100 * one.scores_ST.mean(axis=0), marker, color=color, ms=3.2, alpha=0.75)
                axes.axhline(100 * one.ceiling.estimate, color=color, lw=0.6, alpha=0.7)
                ends.append((100 * float(curve(one.parameters, beyond)[-1]), style.end_label(analysis, one.arm), color))
        axes.set_xlim(0, end)
        return ends

    title = f"{wording.capitalised(wording.spoken(analysis.record.metric))} against generated tokens: fitted curves"
    return [drawn("scaling", title, _CAPTION, chart(plot, "generated tokens", "%"), style.WIDE, 2.9)]


def tables(analysis: Analysis, scaled: Scalings) -> tuple[Table, Table]:
    """The fitted curves with their differences from the baseline's, and the arms without a curve."""
    metric, shifts, rows = analysis.record.metric, scaled.shifts, []
    for one in scaled.fits:
        (ceiling, midpoint), check = shifts.get(one.arm, (None, None)), ("the first half identifies no curve", "")
        if (error := one.prediction) is not None:
            number, limits = interval_texts(error, metric, signed=True)
            check = f"{'holds' if error.low <= 0 <= error.high else 'fails'}: {number}", limits
        higher = interval_texts(ceiling, metric, signed=True) if ceiling else ""
        later = range_texts(midpoint, "{:.2f}".format) if midpoint else ""
        curve = [interval_texts(one.ceiling, metric), range_texts(one.midpoint, wording.quantity)]
        curve += [range_texts(one.exponent, "{:.2g}".format), (f"{100 * one.reached:.0f} %", "")]
        rows.append([one.arm, *curve, *([higher, later] if shifts else ()), check])
    names = ["Arm", f"Ceiling (%){LIMITS}", "Half of the gain at,\ngenerated tokens", "Exponent"]
    names += ["Gain reached\nat the end", *(["Ceiling minus\nbaseline's", "Compute to half of the\ngain / baseline's"]
                                            if shifts else ()), "<First half predicts\nsecond half"]  # fmt: skip
    reasons: dict[str, list[str]] = {}
    for arm, reason in scaled.refused.items():
        reasons.setdefault(reason, []).append(arm)
    refused = [[wording.quoted(arms, len(arms)), reason] for reason, arms in reasons.items()]
    return table(names, rows), table(["Arms without a curve", "<Reason"], refused)
