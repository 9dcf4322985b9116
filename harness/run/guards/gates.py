"""Decides when a run is invalid: a metric of its steps stays out of bounds for a number of steps, or no rewards differ.

The bounds are the section `gates` of a run's spec; a non-finite loss or gradient always ends a run (the learner checks
it). A gate counts steps in a row, and its counts are part of a checkpoint's progress, so that a resumed run ends at the
same step as an uninterrupted one.

All of 119 runs on arithmetic pass the defaults (docs/bounds.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...base.words import without_signal
from ...data import InvalidRun
from ...settings.run import Gates


@dataclass
class GateState:
    """The gates' state between steps, JSON-like; `counts` are steps in a row out of bounds, by gate."""

    counts: dict[str, int] = field(default_factory=dict)
    lowest_reward: float | None = None
    highest_reward: float | None = None
    answered_at_start: float | None = None


# By its name in the section `gates`: the metric, the side of the bound that breaks it, and the meaning of a break.
_GATES = {
    "mismatch_kl": ("mismatch/kl", "above", "the engine samples from a different policy than the one in training"),
    "stuck_groups": (
        "train/stuck_groups", "above", "all completions of a prompt get equal rewards, so nothing is learnt",
    ),
    "weights_changed": (
        "policy/weights_changed", "below",
        "the optimiser has a gradient but the weights do not change; raise optimizer.learning_rate or use float32",
    ),
    "answered": ("train/answered", "below", "completions no longer state an answer ({start:.3g} did at the start)"),
}  # fmt: skip
STEPS = {"mismatch_kl": 1, "stuck_groups": 20, "weights_changed": 5, "answered": 20}  # in a row
LEARNT = ("stuck_groups", "answered")  # no gates of a control arm, because its effect on them is its result


def check_gates(settings: Gates, state: GateState, metrics: Mapping[str, float], step: int) -> None:
    """Count the metrics out of bounds after training step `step` (from 1).

    InvalidRun names metric, bound, value and steps.
    """
    if state.answered_at_start is None:
        state.answered_at_start = metrics["train/answered"]
    for name, (metric, side, meaning) in _GATES.items():
        bound, steps, value = getattr(settings, name), STEPS[name], metrics.get(metric)
        if bound is None or value is None:
            continue
        if name == "answered":
            bound *= state.answered_at_start
        broken = value < bound if side == "below" else not value <= bound  # a NaN mismatch breaks the bound
        state.counts[name] = state.counts.get(name, 0) + 1 if broken else 0
        if state.counts[name] >= steps:
            row = f"{steps} steps in a row" if steps > 1 else "a step"
            raise InvalidRun(
                f"{metric} was {side} {bound:.3g} for {row} ({value:.3g} at step {step}): "
                f"{meaning.format(start=state.answered_at_start)} (gates.{name})"
            )


def check_signal(settings: Gates, state: GateState, metrics: Mapping[str, float], steps: int, limit: int) -> None:
    """InvalidRun if the rewards of all `steps` were equal; `metrics` are the last one's, `limit` is in tokens."""
    if settings.stuck_groups is not None and state.lowest_reward == state.highest_reward:
        raise InvalidRun(f"{without_signal(metrics, limit, f'{steps:,} steps')} (gates.stuck_groups)")
