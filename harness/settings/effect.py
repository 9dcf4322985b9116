"""Decides which settings cannot change a run, so that arms which differ in nothing else are known to be identical."""

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

# Settings of algorithms that have an effect only once the policy differs from the one that sampled.
_CLIPS = {
    "clip_epsilon", "clip_epsilon_high", "ratio_bound", "clip_log_ratio", "weight_max", "value_clip", "divergence_bound"
}  # fmt: skip
_ON_POLICY = (
    "has an effect only if a batch gets several updates or is older than the policy, otherwise the ratio is 1; raise "
    "optimizer.num_minibatches, optimizer.num_inner_epochs or staleness"
)


def inert(spec: Mapping[str, Any]) -> dict[str, str]:
    """Path -> reason, for each setting of a run (as JSON) that cannot change it; none with stages, which have their
    own."""
    if spec.get("stages"):
        return {}
    sections = (spec.get(name) for name in ("algorithm", "optimizer", "mismatch"))
    algorithm, updates, mismatch = (section if isinstance(section, Mapping) else {} for section in sections)
    found: dict[str, str] = {}
    if updates.get("num_minibatches") == updates.get("num_inner_epochs") == 1 and spec.get("staleness") == 0:
        found |= {f"algorithm.{key}": _ON_POLICY for key in sorted(algorithm.keys() & _CLIPS)}
    if algorithm.get("kl_beta") == 0:
        estimates = sorted(algorithm.keys() & {"kl_estimator", "kl_importance_weighted", "kl_in"})
        found |= {f"algorithm.{key}": "has an effect only with an algorithm.kl_beta above 0" for key in estimates}
    if mismatch.get("correction") == "none":
        bounds = sorted(mismatch.keys() & {"level", "bound"})
        found |= {f"mismatch.{key}": "has an effect only with a mismatch.correction" for key in bounds}
    return found


def identical(specs: Mapping[str, Mapping[str, Any]]) -> list[tuple[list[str], str]]:
    """(labels, reason) for each group of runs (as JSON, by label) that differ, seeds apart, only in settings without
    effect; the reason names one of these. Runs with equal settings are no group."""
    groups: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)  # what has an effect -> label -> the rest
    for label, spec in specs.items():
        kept = {key: dict(v) if isinstance(v, Mapping) else v for key, v in spec.items() if key != "seed"}
        parts = {path: path.split(".") for path in inert(spec)}
        rest = {path: kept[section].pop(key) for path, (section, key) in parts.items()}
        groups[json.dumps(kept, sort_keys=True)][label] = rest
    found = []
    for group in groups.values():
        first, *others = group.values()
        differing = [path for path in first if any(other[path] != first[path] for other in others)]
        if differing:
            label = next(iter(group))
            found.append((list(group), f"{differing[0]} {inert(specs[label])[differing[0]]}"))
    return found
