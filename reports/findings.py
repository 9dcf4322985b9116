"""Reads an analysis: which labels or policies collapsed, what components contribute, which effects controls reproduce.

A series collapses at the first step from which it stays below half of its best earlier value to the end.

An arm has an effect if it gains detectably from its start, or is detectably above the baseline. A control reproduces it
if the arm is not detectably above the control, or if the control itself gains. The p-values here are not corrected,
because none supports a claim alone: a control that reproduces an effect by chance only makes a reader careful, and an
arm that stays above all its controls has passed every test.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..harness.base.arms import component_arm
from .analysis import Analysis, Comparison
from .prose import wording
from .statistics import ALPHA, Interval
from .trials import ArmSummary

MEANINGS = {
    "random": "a fair coin for each completion",
    "format_only": "the format score alone",
    "inverted": "1 for a wrong answer",
    "shuffled_gold": "right by another problem's gold answer",
    "frozen": "no update of the policy",
}
# Name -> (metric, number of points averaged). Labels are the majority answers of the groups, for any reward; they are
# averaged because a step has few groups.
_SERIES = {"labels": ("train/majority_accuracy", 10), "policy": ("validation/accuracy", 1)}


@dataclass(frozen=True)
class Collapse:
    """The steps at which `what` collapsed in seeds of an arm, of `num_seeds`."""

    arm: str
    what: str
    steps: tuple[int, ...]
    num_seeds: int


@dataclass(frozen=True)
class Component:
    """The contribution of a component: all minus without it, or it alone minus none; tested by `comparison`."""

    name: str
    effect: float
    interval: Interval | None
    comparison: Comparison


@dataclass(frozen=True)
class ControlVerdict:
    """The verdict of one control on one arm, with the reason if the arm's effect is unexplained, else empty."""

    arm: str
    control: str
    comparison: Comparison
    reading: Literal["no effect", "not reproduced", "unexplained"]
    reason: str = ""


def collapses(analysis: Analysis) -> list[Collapse]:
    """The collapses of each arm, in the study's order; includes invalid runs, because a collapse may end a run."""
    found = []
    for arm in analysis.arms:
        ended = [t for t in analysis.record.trials if t.arm == arm.label and t.state in ("complete", "invalid")]
        for what, (metric, window) in _SERIES.items():
            series = [trial.history[metric] for trial in ended if trial.history.get(metric)]
            if steps := tuple(step for one in series if (step := collapse_step(one, window)) is not None):
                found.append(Collapse(arm.label, what, steps, len(series)))
    return found


def collapse_step(series: Sequence[tuple[int, float]], window: int = 1) -> int | None:
    """The step at which a series of (step, value) collapsed; None if it did not.

    A value is the mean of the last `window` finite ones, from the first full window on.
    """
    known = [(step, value) for step, value in series if math.isfinite(value)]
    best, since = -math.inf, None
    for place in range(window, len(known) + 1):
        step, value = known[place - 1][0], sum(v for _, v in known[place - window : place]) / window
        since = (step if since is None else since) if value < best / 2 else None
        best = max(best, value)
    return since


def ranked_components(analysis: Analysis) -> list[Component]:
    """The components whose arm can be compared with the baseline, by falling contribution."""
    design, found = str(analysis.record.spec.get("design")), []
    if design not in ("leave_one_out", "add_one_in"):
        return []
    for name in analysis.record.spec["components"]:
        one = analysis.comparison(component_arm(design, name))
        if one is None:
            continue
        effect, interval = one.estimate, one.interval
        if design == "leave_one_out":
            effect = -effect
            interval = interval and replace(interval, estimate=effect, low=-interval.high, high=-interval.low)
        found.append(Component(name, effect, interval, one))
    return sorted(found, key=lambda component: -component.effect)


def verdicts(analysis: Analysis) -> list[ControlVerdict]:
    """Every control with every arm that it can be compared with, in the order of the controls."""
    found = []
    for control, one in ((each.summary, one) for each in analysis.controls for one in each.comparisons):
        above, reasons = analysis.comparison(one.arm), []
        reading = "no effect"
        if _gains(one.summary) or (above is not None and above.is_detected and above.estimate > 0):
            if not (one.p < ALPHA and one.estimate > 0):
                reasons.append("the arm is not detectably above it")
            if (gain := control.gain) is not None and _gains(control):
                reasons.append(f"it gains {wording.points(gain.estimate, analysis.outcome.name, gain)} itself")
            reading = "unexplained" if reasons else "not reproduced"
        found.append(ControlVerdict(one.arm, control.label, one, reading, " and ".join(reasons)))
    return found


def _gains(arm: ArmSummary) -> bool:
    return arm.gain is not None and arm.gain_p < ALPHA and arm.gain.estimate > 0
