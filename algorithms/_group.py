"""The group-relative algorithms compare each answer with the other answers to the same prompt."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from algorithms._advantages import group_advantages, group_standardised
from algorithms._losses import KLEstimator, clipped_surrogate, kl_estimate, policy_metrics, token_ratio
from harness.interfaces import Algorithm
from harness.types import Batch, PolicyOutput


class GroupObjective(Algorithm):
    """Clipped surrogate on rewards made comparable within their group, with a KL penalty in the loss
    (arXiv:2402.03300, eq. 3-4); a subclass says how rewards are normalised."""

    min_group_size: ClassVar[int] = 2
    objective: ClassVar[Mapping[str, str]] = {
        "aggregation": "mean over a row's tokens, then over rows",
        "clip": "ratio of each token, 1 - clip_epsilon to 1 + clip_epsilon_high",
        "kl": "kl_beta * kl_estimator to the reference, in the loss",
        "correction": "none",
    }

    clip_epsilon: float = Field(0.2, gt=0, lt=1, description="binds only when a batch gets more than one update")
    clip_epsilon_high: float | None = Field(
        default=None, gt=0, description="how far the ratio may rise above 1; by default clip_epsilon"
    )
    kl_beta: float = Field(0.04, ge=0, description="weight of the KL to the frozen reference, in the loss; 0: none")
    kl_estimator: KLEstimator = Field(
        default="k3",
        description="per-token estimate of that KL; gradients: k2 of KL(policy, reference), k3 of KL(reference, "
        "policy), k1 none in expectation",
    )

    @abstractmethod
    def normalised(self, rewards_PG: Tensor, mask_PG: Tensor | None = None) -> Tensor:
        """[P, G]: the rewards, made comparable within each group; only those in the mask count, the rest is 0."""

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages_BT=group_advantages(batch, self.normalised))

    def surrogate(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, Tensor]:
        """(per-token loss without the KL, whether a clip binds the token), both [B, T]."""
        assert batch.advantages_BT is not None
        ratio_BT = token_ratio(batch, policy)
        return clipped_surrogate(ratio_BT, batch.advantages_BT, self.clip_epsilon, self.clip_epsilon_high)

    def token_weights(self, batch: Batch) -> Tensor:
        """[B, T]: the weight of each token in the loss; it differs from `loss_weight_BT` if it does not sum to 1."""
        assert batch.loss_weight_BT is not None
        return batch.loss_weight_BT

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        per_token, clipped = self.surrogate(batch, policy)
        if batch.ref_logprobs_BT is not None:
            divergence = kl_estimate(self.kl_estimator, policy.logprobs_BT, batch.ref_logprobs_BT)
            per_token = per_token + self.kl_beta * divergence
        loss = (self.token_weights(batch) * per_token).sum()
        return loss, {"policy/loss": loss.detach(), **policy_metrics(batch, policy, clipped)}


class GroupRelative(GroupObjective):
    """The group's rewards are standardised (arXiv:2402.03300, section 4.1.2)."""

    objective: ClassVar[Mapping[str, str]] = {
        "advantage": "(r - mean) / (std + std_floor) in the group",
        **GroupObjective.objective,
    }

    std_floor: float = Field(default=1e-4, gt=0, description="added to the group's standard deviation")

    def normalised(self, rewards_PG: Tensor, mask_PG: Tensor | None = None) -> Tensor:
        return group_standardised(rewards_PG, self.std_floor, mask_PG)
