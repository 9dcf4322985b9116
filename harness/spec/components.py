"""Decides the arms of a study of components: all components and each one left out, or none and each one alone.

A component is a name for a set of settings. A component that provably cannot change a run is refused with the reason:
its effect is 0 by construction, and a rank among others would hide that.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from ..data import component_arm
from .run import RunSpec

Components = Mapping[str, Mapping[str, Any]]  # name -> dotted path of a run -> value
REFERENCE: dict[str, str] = {"leave_one_out": "all", "add_one_in": "none"}  # design -> label of its baseline

# Settings of algorithms that have an effect only once the policy differs from the one that sampled.
_CLIPS = {
    "clip_epsilon", "clip_epsilon_high", "ratio_bound", "clip_log_ratio", "weight_max", "value_clip", "divergence_bound"
}  # fmt: skip


def component_arms(design: str, components: Components) -> dict[str, dict[str, Any]]:
    """Label -> overrides of the n + 1 arms, the reference first.

    ValueError if two components set the same setting: with both on, their order would decide its value.
    """
    for (one, mine), (other, theirs) in combinations(components.items(), 2):
        both = [
            path for path in mine for held in theirs if f"{path}.".startswith(f"{held}.") or held.startswith(f"{path}.")
        ]
        if both:
            raise ValueError(f"components must not share a setting, got {both[0]} in '{one}' and in '{other}'")
    if design == "add_one_in":
        chosen = {component_arm(design, name): [name] for name in components}
    else:
        chosen = {component_arm(design, name): [one for one in components if one != name] for name in components}
    reference = list(components) if design == "leave_one_out" else []
    return {
        label: {path: value for name in names for path, value in components[name].items()}
        for label, names in {REFERENCE[design]: reference, **chosen}.items()
    }


def why_inert(component: Mapping[str, Any], on: RunSpec, off: RunSpec) -> str:
    """The reason that a component's setting cannot change a run; empty if it can."""
    with_it, without = on.model_dump(mode="json"), off.model_dump(mode="json")
    for path in component:
        value = _at(with_it, path)
        if value == _at(without, path):
            return f"{path} is {value} without the component too"
        section, _, key = path.rpartition(".")
        if section == "algorithm" and key in _CLIPS and _never_moves(on) and _never_moves(off):
            return (
                f"{path} has an effect only if a batch gets several updates or is older than the policy, otherwise the "
                "ratio is 1; raise optimizer.num_minibatches, optimizer.num_inner_epochs or staleness"
            )
    return ""


def _never_moves(spec: RunSpec) -> bool:
    """Whether every update is on-policy: one update per batch, and no staleness."""
    return spec.updates_per_step == 1 and not spec.staleness


def _at(spec: Any, path: str) -> Any:
    for key in path.split("."):
        spec = spec.get(key) if isinstance(spec, Mapping) else None
    return spec
