"""Decides when a run is invalid: a metric of its steps stays out of bounds for a number of steps.

The bounds are the section `gates` of a run's spec; a non-finite loss or gradient always ends a run (the learner checks
it). A gate counts steps in a row, and its counts are part of a checkpoint's progress, so that a resumed run ends at the
same step as an uninterrupted one.

All of 119 runs on arithmetic (six shipped studies, 30 to 150 steps each) pass the defaults. In them, at most 3 steps in
a row had more than 90 % of the groups without an advantage (self-consistency from the strong start), the answered share
was at least 0.92 times that of the start, and the entropy fell to 0.004 nats per token at 91 % test accuracy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..data import Batch, InvalidRun
from ..devices import ranks
from ..devices.sharding import local
from ..spec.run import Gates, RunSpec

LEAST_GRADIENT = 1e-6  # gradient norm below which AdamW's epsilon (1e-8 per weight) makes the update vanish
SAMPLED = 4096


@dataclass
class GateState:
    """The gates' state between steps, JSON-like; `counts` are steps in a row out of bounds, by gate."""

    counts: dict[str, int] = field(default_factory=dict)
    lowest_reward: float | None = None
    highest_reward: float | None = None
    answered_at_start: float | None = None


# By its name in the section `gates`: the metric, the side of the bound that breaks it, and the meaning of a break.
_GATES = {
    "mismatch_kl": ("mismatch/kl", "above", "the engine samples from another policy than the one in training"),
    "stuck_groups": (
        "train/stuck_groups", "above", "all completions of a prompt get equal rewards, so nothing is learnt",
    ),
    "weights_changed": (
        "policy/weights_changed", "below",
        "the optimiser has a gradient but the weights do not change; raise optimizer.learning_rate or use float32",
    ),
    "entropy": ("policy/entropy", "below", "the policy has lost its entropy"),
    "answered": ("train/answered", "below", "completions no longer state an answer ({start:.3g} did at the start)"),
}  # fmt: skip
STEPS = {"mismatch_kl": 1, "stuck_groups": 20, "weights_changed": 5, "entropy": 20, "answered": 20}  # in a row
_LEARNT = ("stuck_groups", "entropy", "answered")


def gates_of(spec: RunSpec) -> Gates:
    """The gates of a run. A control arm has no gates on learning, because its effect on learning is its result; a
    control with a frozen policy has no gate on changed weights."""
    return spec.gates if spec.control is None else spec.gates.model_copy(update=dict.fromkeys(_LEARNT))


def check_gates(settings: Gates, state: GateState, metrics: Mapping[str, float], step: int) -> None:
    """Count the metrics out of bounds after training step `step` (from 1).

    InvalidRun names metric, bound, value and steps.

    `metrics` are the step's own, with those of `group_metrics` and `weights_metric`.
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


def group_metrics(batch: Batch, state: GateState) -> dict[str, float]:
    """Shares of the batch's groups: `train/zero_advantage_groups` have no advantage on any token; `train/stuck_groups`
    are those among them whose reward is not the best that the run has seen.

    A group in which every completion earns the best reward is solved, not stuck: a run whose groups are all solved (or,
    with votes, unanimous) has nothing left to learn. As long as all rewards of a run are equal, none counts as best.
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
    """Copies of at most `SAMPLED` weights of each trained tensor, the same ones every time."""
    trained = [local(p.detach()).flatten() for p in policy.parameters() if p.requires_grad]
    return [p[:: p.numel() // SAMPLED | 1].clone() for p in trained]  # an odd stride visits all columns of a matrix


def weights_metric(
    policy: nn.Module, before: Sequence[Tensor], *, gradient_norm: float, rate: float
) -> dict[str, float]:
    """`policy/weights_changed`: the share of the sampled weights that an update changed.

    Empty if the update had no effect to expect: the learning rate is 0 or the gradient norm is below `LEAST_GRADIENT`.
    """
    if not rate > 0 or not gradient_norm > LEAST_GRADIENT:
        return {}
    changed = torch.stack([(old != new).sum() for old, new in zip(before, weight_sample(policy), strict=True)]).sum()
    total = torch.full_like(changed, sum(map(len, before)))
    num_changed, num_sampled = ranks.summed(torch.stack([changed, total])).tolist()
    return {"policy/weights_changed": num_changed / num_sampled}
