"""Decides which effects of a study its controls leave unexplained.

An arm has an effect if it gains detectably from its start, or is detectably above the baseline. A control reproduces it
if the arm is not detectably above the control, or if the control itself gains. The p-values here are not corrected,
because none supports a claim alone: a control that reproduces an effect by chance only makes a reader careful, and an
arm that stays above all its controls has passed every test.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .analysis import Analysis, ArmSummary, Comparison, ControlArm
from .prose import wording
from .statistics import ALPHA

MEANINGS = {
    "random": "a fair coin for each completion",
    "format_only": "the format score alone",
    "inverted": "1 for a wrong answer",
    "shuffled_gold": "right by another problem's gold answer",
    "frozen": "no update of the policy",
}


@dataclass(frozen=True)
class Verdict:
    """The verdict of one control on one arm, with the reason if the arm's effect is unexplained, else empty."""

    arm: str
    control: str
    comparison: Comparison
    reading: Literal["no effect", "not reproduced", "unexplained"]
    reason: str = ""


def verdicts(analysis: Analysis) -> list[Verdict]:
    """Every control with every arm that it can be compared with, in the order of the controls."""
    return [_verdict(one, control, analysis) for control in analysis.controls for one in control.comparisons]


def unexplained(found: Sequence[Verdict]) -> dict[str, list[str]]:
    """Arm -> the controls that reproduce its effect."""
    arms: dict[str, list[str]] = {}
    for one in found:
        if one.reading == "unexplained":
            arms.setdefault(one.arm, []).append(one.control)
    return arms


def _verdict(comparison: Comparison, control: ControlArm, analysis: Analysis) -> Verdict:
    arm, metric = comparison.summary, analysis.outcome.name
    above = analysis.comparison(arm.label)
    if not _gains(arm) and not (above is not None and above.is_detected and above.estimate > 0):
        return Verdict(arm.label, control.summary.label, comparison, "no effect")
    reasons = []
    if not (comparison.p < ALPHA and comparison.estimate > 0):
        reasons.append("the arm is not detectably above it")
    if _gains(control.summary) and control.summary.gain is not None:
        points = wording.points(control.summary.gain.estimate, metric, control.summary.gain)
        reasons.append(f"it gains {points} itself")
    reading = "unexplained" if reasons else "not reproduced"
    return Verdict(arm.label, control.summary.label, comparison, reading, " and ".join(reasons))


def _gains(arm: ArmSummary) -> bool:
    return arm.gain is not None and arm.gain_p < ALPHA and arm.gain.estimate > 0
