"""Credit goes to tokens that turn out better than a learned critic expected.

Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with GAE (arXiv:1506.02438) as RLHF uses
it (Ouyang et al. 2022, arXiv:2203.02155): verifiable reward on the last token, a per-token KL penalty to the frozen
reference inside the reward (k1 estimate), advantages whitened over the batch's tokens, clipped value loss. The critic
is a separate network with its own optimiser, initialised from the policy with a zero head. Losses are means over all
tokens of a minibatch. A completion cut by the token limit is terminal, as every other.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from algorithms._objectives import at_last_token, clipped_surrogate, generalised_advantages, policy_metrics
from harness.interfaces import Algorithm
from harness.tensors import kl_k1, whiten
from harness.types import Batch, GradedGroup, PolicyOutput


class PPO(Algorithm):
    """Clipped surrogate on GAE advantages from a separate critic, KL in the reward (RLHF's PPO)."""

    needs_critic: ClassVar[bool] = True

    name: Literal["ppo"] = "ppo"
    clip_epsilon: float = Field(
        default=0.2, gt=0, lt=1, description="binds only when a batch gets more than one update"
    )
    kl_beta: float = Field(
        default=0.01, ge=0, description="weight of the KL to the frozen reference, in the reward; 0: none"
    )
    gamma: float = Field(default=1.0, ge=0, le=1, description="discount per token")
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="1: Monte-Carlo returns minus values")
    value_clip: float = Field(
        default=0.2, gt=0, description="how far a value may move from the rollout's in the value loss"
    )
    entropy_bonus: float = Field(
        default=0.0, ge=0, description="weight of the mean token entropy, added to the objective"
    )

    @property
    def needs_reference(self) -> bool:
        return self.kl_beta > 0

    @property
    def needs_old_logprobs(self) -> bool:
        return self.kl_beta > 0

    @property
    def entropy_needs_gradient(self) -> bool:
        return self.entropy_bonus > 0

    def rewards(self, group: GradedGroup) -> list[float]:
        assert group.correct is not None
        return [float(correct) for correct in group.correct]

    def advantages(self, batch: Batch) -> Batch:
        mask, values = batch.completion_mask_BT, batch.values_BT
        assert values is not None
        rewards_BT = at_last_token(batch.rewards_B, mask)
        if batch.ref_logprobs_BT is not None:
            assert batch.old_logprobs_BT is not None
            rewards_BT = rewards_BT - self.kl_beta * kl_k1(batch.old_logprobs_BT, batch.ref_logprobs_BT) * mask
        advantages = generalised_advantages(rewards_BT, values, mask, self.gamma, self.gae_lambda)
        return batch.replace(advantages_BT=whiten(advantages, mask), returns_BT=(advantages + values) * mask)

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        weight, values, old_values, returns = (
            batch.loss_weight_BT, policy.values_BT, batch.values_BT, batch.returns_BT,
        )  # fmt: skip
        assert weight is not None and values is not None and old_values is not None and returns is not None
        assert batch.advantages_BT is not None and batch.old_logprobs_BT is not None
        per_token, clipped = clipped_surrogate(
            policy.logprobs_BT, batch.old_logprobs_BT, batch.advantages_BT, self.clip_epsilon
        )
        policy_loss = (weight * (per_token - self.entropy_bonus * policy.entropy_BT)).sum()
        near = old_values + (values - old_values).clamp(-self.value_clip, self.value_clip)
        squared = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
        critic_loss = 0.5 * (weight * squared).sum()
        metrics = {"policy/loss": policy_loss.detach(), "critic/loss": critic_loss.detach()}
        return policy_loss + critic_loss, metrics | policy_metrics(batch, policy, clipped)

    def loss_weights(self, completion_mask_BT: Tensor) -> Tensor:
        return completion_mask_BT / completion_mask_BT.sum().clamp(min=1)
