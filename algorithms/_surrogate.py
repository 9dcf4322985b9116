"""The parts of a policy loss: the clip of the ratio, the KL in the loss, sums over tokens."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator

from ..harness.data import Batch, PolicyOutput, Tensor
from ..harness.interfaces import Algorithm
from ._losses import KLEstimator, clipped_surrogate, kl_estimate, policy_metrics, row_sum_weights, token_ratio


class Clip(Algorithm):
    """Settings of a clip of the ratio; the algorithm decides what the ratio is taken over."""

    clip_epsilon: float = Field(
        0.2, gt=0, lt=1, description="how far the ratio may fall below 1; binds from the 2nd update of a batch"
    )
    clip_epsilon_high: float | None = Field(
        default=None, gt=0, description="how far the ratio may rise above 1; by default clip_epsilon"
    )
    ratio_bound: float | None = Field(
        default=None,
        gt=1,
        description="bound of the ratio for negative advantages (dual or two-sided clip); null: no bound",
    )

    @model_validator(mode="after")
    def _the_bound_lies_beyond_the_clip(self) -> Self:
        highest = 1 + (self.clip_epsilon if self.clip_epsilon_high is None else self.clip_epsilon_high)
        if self.ratio_bound is not None and self.ratio_bound < highest:
            raise ValueError(
                f"algorithm.ratio_bound must be at least the upper clip, {highest:g}, got {self.ratio_bound:g}; raise "
                "it or lower algorithm.clip_epsilon_high"
            )
        return self

    def clipped(self, ratio: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(per-token loss, whether a clip cuts the token's gradient), both [B, T]; `ratio` is [B, T] or [B, 1]."""
        assert batch.advantages_BT is not None
        return clipped_surrogate(
            ratio, batch.advantages_BT, self.clip_epsilon, self.clip_epsilon_high, self.ratio_bound
        )


class SurrogateLoss(Algorithm):
    """A per-token loss, given by a subclass, plus a KL penalty (arXiv:2402.03300, eq. 3-4)."""

    objective: ClassVar[Mapping[str, str]] = {
        "aggregation": "mean over a row's tokens, then over rows",
        "clip": "none",
        "kl": "kl_beta * kl_estimator to the reference, in the loss (times the token's ratio: kl_importance_weighted)",
        "correction": "none",
    }

    kl_beta: float = Field(0.0, ge=0, description="weight of the KL to the frozen reference, in the loss; 0: none")
    kl_estimator: KLEstimator = Field(
        default="k3",
        description="per-token KL estimator; its gradient is that of: k2, KL(policy, reference); k3, KL(reference, "
        "policy); k1, none in expectation",
    )
    kl_importance_weighted: bool = Field(
        default=False,
        description="multiply the estimate by the token's ratio, with its gradient (DeepSeek-V3.2, arXiv:2512.02556): "
        "k1 and k3 then have the gradient of KL(policy, reference), off policy too",
    )

    @abstractmethod
    def surrogate(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, Tensor]:
        """(per-token loss without the KL, whether a clip binds the token), both [B, T]."""

    def kl_to_reference(self, batch: Batch, policy: PolicyOutput) -> Tensor:
        """[B, T] nats: the estimate of each token's KL to the reference."""
        assert batch.ref_logprobs_BT is not None
        estimate = kl_estimate(self.kl_estimator, policy.logprobs_BT, batch.ref_logprobs_BT)
        return token_ratio(batch, policy) * estimate if self.kl_importance_weighted else estimate

    def token_weights(self, batch: Batch) -> Tensor:
        """[B, T]: the weight of each token in the loss; it differs from `loss_weight_BT` if it does not sum to 1."""
        assert batch.loss_weight_BT is not None
        return batch.loss_weight_BT

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        per_token, clipped = self.surrogate(batch, policy)
        if batch.ref_logprobs_BT is not None:
            per_token = per_token + self.kl_beta * self.kl_to_reference(batch, policy)
        loss = (self.token_weights(batch) * per_token).sum()
        return loss, {"policy/loss": loss.detach(), **policy_metrics(batch, policy, clipped)}


class ClippedLoss(Clip, SurrogateLoss):
    """The clipped surrogate of each token's ratio (PPO, arXiv:1707.06347, eq. 7)."""

    objective: ClassVar[Mapping[str, str]] = {
        **SurrogateLoss.objective,
        "clip": "ratio of each token, 1 - clip_epsilon to 1 + clip_epsilon_high, at most ratio_bound",
    }

    def surrogate(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, Tensor]:
        return self.clipped(token_ratio(batch, policy), batch)


class SummedLoss(SurrogateLoss):
    """The sum over a completion's tokens, divided by a constant, so that no answer's length rescales its gradient."""

    objective: ClassVar[Mapping[str, str]] = {
        **SurrogateLoss.objective,
        "aggregation": "sum over all tokens / (rows * loss_denominator)",
    }

    loss_denominator: float = Field(
        default=128.0,
        gt=0,
        description="constant (tokens) that divides the sum over a completion; in Dr. GRPO's paper the token limit",
    )

    def token_weights(self, batch: Batch) -> Tensor:
        return row_sum_weights(batch) / self.loss_denominator
