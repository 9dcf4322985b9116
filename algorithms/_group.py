"""The objective of GRPO, shared by the algorithms that differ from it only in their rewards."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from algorithms._objectives import clipped_surrogate, group_standardised, policy_metrics
from harness.interfaces import Algorithm
from harness.tensors import kl_k3
from harness.types import Batch, PolicyOutput


class GroupRelative(Algorithm):
    """Clipped surrogate on group-standardised rewards with a k3 KL penalty in the loss (arXiv:2402.03300, eq. 3-4)."""

    min_group_size: ClassVar[int] = 2

    clip_epsilon: float = Field(
        default=0.2, gt=0, lt=1, description="binds only when a batch gets more than one update"
    )
    kl_beta: float = Field(
        default=0.04, ge=0, description="weight of the KL to the frozen reference, in the loss; 0: none"
    )
    std_floor: float = Field(default=1e-4, gt=0, description="added to the group's standard deviation")

    @property
    def needs_reference(self) -> bool:
        return self.kl_beta > 0

    def advantages(self, batch: Batch) -> Batch:
        advantages_PG = group_standardised(batch.rewards_PG, self.std_floor)
        return batch.replace(advantages_BT=advantages_PG.reshape(-1, 1) * batch.completion_mask_BT)

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.advantages_BT is not None and batch.old_logprobs_BT is not None
        assert batch.loss_weight_BT is not None
        per_token, clipped = clipped_surrogate(
            policy.logprobs_BT, batch.old_logprobs_BT, batch.advantages_BT, self.clip_epsilon
        )
        if batch.ref_logprobs_BT is not None:
            per_token = per_token + self.kl_beta * kl_k3(policy.logprobs_BT, batch.ref_logprobs_BT)
        loss = (batch.loss_weight_BT * per_token).sum()
        return loss, {"policy/loss": loss.detach(), **policy_metrics(batch, policy, clipped)}
