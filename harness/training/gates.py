"""Decides when a run's result must not be used: bounds on the metrics of a step, each for a number of steps.

The bounds are the section `gates` of a run's spec; a non-finite loss or gradient ends a run whatever they say (the
learner finds it). A gate counts steps in a row, and its counts are part of a checkpoint's progress, so that a resumed
run ends at the step at which an uninterrupted one does.

The defaults pass all of 119 runs on arithmetic (six shipped studies, 30 to 150 steps each), which had at most 3
steps in a row with more than 90 % of the groups without an advantage (self-consistency from the strong start), an
answered share of at least 0.92 times that of the start, an entropy down to 0.004 nats per token at 91 % test accuracy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from harness.spec.run import Gates
from harness.types import Batch, InvalidRun

LEAST_GRADIENT = 1e-6  # norm below which AdamW's own epsilon (1e-8 per weight) makes an update vanish
SAMPLED = 4096


@dataclass
class GateState:
    """The gates' memory between steps, as JSON holds it; `counts` are steps in a row out of bounds, by gate."""

    counts: dict[str, int] = field(default_factory=dict)
    lowest_reward: float | None = None
    highest_reward: float | None = None
    answered_at_start: float | None = None


@dataclass(frozen=True)
class _Bound:
    """One gate: a metric, its bound, the steps in a row that break it, and the meaning of a break."""

    metric: str
    bound: float | None
    steps: int
    broken: Callable[[float, float], bool]
    side: str
    meaning: str


def check_gates(settings: Gates, state: GateState, metrics: Mapping[str, float], step: int) -> None:
    """Count the metrics out of bounds after training step `step` (from 1).

    InvalidRun names metric, bound, value and steps.

    `metrics` are the step's own, with those of `group_metrics` and `weights_metric`.
    """
    if state.answered_at_start is None:
        state.answered_at_start = metrics["train/answered"]
    for name, gate in _bounds(settings, state).items():
        value = metrics.get(gate.metric)
        if gate.bound is None or value is None:
            continue
        state.counts[name] = state.counts.get(name, 0) + 1 if gate.broken(value, gate.bound) else 0
        if state.counts[name] >= gate.steps:
            row = f"{gate.steps} steps in a row" if gate.steps > 1 else "a step"
            raise InvalidRun(
                f"{gate.metric} was {gate.side} {gate.bound:.3g} for {row} ({value:.3g} at step {step}): "
                f"{gate.meaning} (gates.{name})"
            )


def _bounds(settings: Gates, state: GateState) -> dict[str, _Bound]:
    answered = settings.answered
    if answered is not None:
        answered *= state.answered_at_start or 0.0
    return {
        "mismatch_kl": _Bound(
            "mismatch/kl", settings.mismatch_kl, 1, lambda x, bound: not x <= bound, "above",
            "the engine samples another policy than the one that is trained",
        ),
        "stuck_groups": _Bound(
            "train/stuck_groups", settings.stuck_groups, settings.stuck_groups_steps, lambda x, bound: x > bound,
            "above", "the rewards tell no completions of a prompt apart, so that nothing is learnt",
        ),
        "weights_changed": _Bound(
            "policy/weights_changed", settings.weights_changed, settings.weights_changed_steps,
            lambda x, bound: x < bound, "below",
            "the optimiser steps with a gradient and the weights stay; raise optimizer.learning_rate or use float32",
        ),
        "entropy": _Bound(
            "policy/entropy", settings.entropy, settings.entropy_steps, lambda x, bound: x < bound, "below",
            "the policy has lost its entropy",
        ),
        "answered": _Bound(
            "train/answered", answered, settings.answered_steps, lambda x, bound: x < bound, "below",
            f"completions no longer state an answer ({state.answered_at_start:.3g} did at the start)",
        ),
    }  # fmt: skip


def group_metrics(batch: Batch, state: GateState) -> dict[str, float]:
    """Shares of the batch's groups: `train/zero_advantage_groups` with no advantage on any token, and of these
    `train/stuck_groups`, whose reward is not the best that the run has seen.

    A group that earns the best reward throughout is solved, not stuck: where a run ends with all groups solved (or, by
    votes, unanimous) there is nothing left to learn. As long as all rewards of a run are equal, none counts as best.
    """
    assert batch.advantages_BT is not None
    rewards_PG = batch.rewards_PG
    lowest, highest = float(rewards_PG.min()), float(rewards_PG.max())
    state.lowest_reward = lowest if state.lowest_reward is None else min(lowest, state.lowest_reward)
    state.highest_reward = highest if state.highest_reward is None else max(highest, state.highest_reward)
    zero_P = (batch.advantages_BT.view(len(rewards_PG), -1) == 0).all(dim=1)
    best_P = (rewards_PG == state.highest_reward).all(dim=1) & (state.highest_reward > state.lowest_reward)
    return {
        "train/zero_advantage_groups": float(zero_P.float().mean()),
        "train/stuck_groups": float((zero_P & ~best_P).float().mean()),
    }


def weight_sample(policy: nn.Module) -> list[Tensor]:
    """Copies of at most `SAMPLED` weights of each trained tensor, always the same ones."""
    trained = [p.detach().flatten() for p in policy.parameters() if p.requires_grad]
    return [p[:: p.numel() // SAMPLED | 1].clone() for p in trained]  # an odd stride visits all columns of a matrix


def weights_metric(
    policy: nn.Module, before: Sequence[Tensor], *, gradient_norm: float, rate: float
) -> dict[str, float]:
    """`policy/weights_changed`: the share of the sampled weights that an update changed at all.

    Nothing where an update had nothing to do: a learning rate of 0, or no gradient to speak of (`LEAST_GRADIENT`).
    """
    if not rate > 0 or not gradient_norm > LEAST_GRADIENT:
        return {}
    changed = [(old != new).sum() for old, new in zip(before, weight_sample(policy), strict=True)]
    return {"policy/weights_changed": float(sum(map(int, changed)) / sum(map(len, before)))}
