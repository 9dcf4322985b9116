"""Pure functions that objectives share: group standardisation, the clipped surrogate, GAE, what a step reports."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.tensors import kl_k3
from harness.types import Batch, PolicyOutput


def group_standardised(rewards_PG: Tensor, std_floor: float) -> Tensor:
    """[P, G]: (r - mean) / (std + std_floor) within each group, std with G - 1 in the denominator.

    DeepSeekMath, arXiv:2402.03300, section 4.1.2. A group of equal rewards gives exact zeros, whatever the rounding
    of its mean.
    """
    centred = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    standardised = centred / (rewards_PG.std(dim=1, keepdim=True) + std_floor)
    equal = (rewards_PG == rewards_PG[:, :1]).all(dim=1, keepdim=True)
    return torch.where(equal, torch.zeros_like(standardised), standardised)


def clipped_surrogate(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, clip_epsilon: float
) -> tuple[Tensor, Tensor]:
    """(per-token loss, per-token bool of where the clip cuts the gradient), both [B, T].

    PPO, arXiv:1707.06347, eq. 7, negated: -min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A).
    """
    ratio = torch.exp(logprobs_BT - old_logprobs_BT)
    free = ratio * advantages_BT
    clipped = ratio.clamp(1 - clip_epsilon, 1 + clip_epsilon) * advantages_BT
    return -torch.minimum(free, clipped), clipped < free


def generalised_advantages(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """[B, T] GAE(gamma, lambda) on the tokens in the mask, 0 elsewhere; a row's last token is terminal.

    arXiv:1506.02438, eq. 16: delta_t = r_t + gamma * V_{t+1} - V_t, A_t = delta_t + gamma * lambda * A_{t+1}.
    """
    advantages = torch.zeros_like(rewards_BT)
    running = next_value = torch.zeros_like(rewards_BT[:, 0])
    for t in reversed(range(rewards_BT.shape[1])):
        mask = mask_BT[:, t]
        delta = rewards_BT[:, t] + gamma * next_value - values_BT[:, t]
        running = torch.where(mask, delta + gamma * gae_lambda * running, torch.zeros_like(running))
        next_value = torch.where(mask, values_BT[:, t], torch.zeros_like(next_value))
        advantages[:, t] = running
    return advantages


def at_last_token(rewards_B: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T]: each row's reward on its last token in the mask, 0 elsewhere."""
    later = mask_BT.flip(1).cumsum(1).flip(1)
    return torch.where(mask_BT & (later == 1), rewards_B[:, None], torch.zeros_like(rewards_B[:, None]))


def policy_metrics(batch: Batch, policy: PolicyOutput, clipped_BT: Tensor) -> dict[str, Tensor]:
    """Weighted sums that every clipped objective reports: clip fraction, entropy, KL to the sampling policy, and KL to
    the reference where there is one (k3 estimates, nats per token)."""
    assert batch.loss_weight_BT is not None and batch.old_logprobs_BT is not None
    weight, logprobs = batch.loss_weight_BT, policy.logprobs_BT.detach()
    metrics = {
        "policy/clip_fraction": (weight * clipped_BT).sum(),
        "policy/entropy": (weight * policy.entropy_BT.detach()).sum(),
        "kl/old": (weight * kl_k3(logprobs, batch.old_logprobs_BT)).sum(),
    }
    if batch.ref_logprobs_BT is not None:
        metrics["kl/reference"] = (weight * kl_k3(logprobs, batch.ref_logprobs_BT)).sum()
    return metrics
