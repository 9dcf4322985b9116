"""Ranks the components of a study by their contribution, with all others present or with none of them."""

from dataclasses import dataclass, replace

from ..harness.data import component_arm
from .analysis import Analysis, Comparison
from .statistics import Interval


@dataclass(frozen=True)
class Component:
    """The contribution of a component: all minus without it, or it alone minus none; tested by `comparison`."""

    name: str
    effect: float
    interval: Interval | None
    comparison: Comparison


def ranked_components(analysis: Analysis) -> list[Component]:
    """The components whose arm can be compared with the baseline, by falling contribution."""
    design, found = str(analysis.record.spec.get("design")), []
    if design not in ("leave_one_out", "add_one_in"):
        return []
    for name in analysis.record.spec["components"]:
        comparison = analysis.comparison(component_arm(design, name))
        if comparison is None:
            continue
        sign = -1 if design == "leave_one_out" else 1
        found.append(Component(name, sign * comparison.estimate, _signed(comparison.interval, sign), comparison))
    return sorted(found, key=lambda component: -component.effect)


def _signed(interval: Interval | None, sign: int) -> Interval | None:
    if interval is None or sign > 0:
        return interval
    return replace(interval, estimate=-interval.estimate, low=-interval.high, high=-interval.low)
