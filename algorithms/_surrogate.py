"""Settings and parts that several objectives share: the clip, the KL in loss or reward, sums and means over tokens."""

from typing import Literal, Self

from pydantic import Field, model_validator

from ..harness.data import Batch, PolicyOutput, Tensor
from ..harness.interfaces import Algorithm
from ._advantages import at_last_token, group_advantages, group_standardised
from ._losses import KLEstimator, clipped_surrogate, kl_estimate, token_ratio, weighted_loss


class Clip(Algorithm):
    """A clip of the ratio; the algorithm decides what the ratio is taken over."""

    objective = {"clip": "ratio of each token, 1 - clip_epsilon to 1 + clip_epsilon_high, at most ratio_bound"}

    clip_epsilon: float = Field(
        default=0.2, gt=0, lt=1, description="how far the ratio may fall below 1; binds from the 2nd update of a batch"
    )
    clip_epsilon_high: float | None = Field(default=None, gt=0, description="ratio's rise above 1; null: clip_epsilon")
    ratio_bound: float | None = Field(
        default=None, gt=1, description="bound of the ratio for negative advantages (dual clip); null: none"
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
        bounds = (self.clip_epsilon, self.clip_epsilon_high, self.ratio_bound)
        return clipped_surrogate(ratio, batch.advantages_BT, *bounds)


class RewardKL(Algorithm):
    """A KL penalty in the reward, before advantages (Ouyang et al. 2022, arXiv:2203.02155)."""

    kl_beta: float = Field(default=0.01, ge=0, description="weight of the KL to the reference, in the reward; 0: none")

    @property
    def needs_old_logprobs(self) -> bool:
        return self.kl_beta > 0


class LossKL(Algorithm):
    """A KL penalty in the loss, beside the per-token loss of the algorithm (arXiv:2402.03300, eq. 3-4)."""

    objective = {
        "kl": "kl_beta * kl_estimator to the reference, in the loss (times the token's ratio: kl_importance_weighted)"
    }

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

    def token_weights(self, batch: Batch) -> Tensor:
        """[B, T]: the weight of each token in the loss; it differs from `loss_weight_BT` if it does not sum to 1."""
        assert batch.loss_weight_BT is not None
        return batch.loss_weight_BT

    def total(
        self, batch: Batch, policy: PolicyOutput, per_token: Tensor, clipped: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its metrics: the weighted sum of a per-token loss, plus kl_beta times the KL to the reference.

        `clipped` says which tokens have lost their gradient to a clip; all are [B, T].
        """
        if batch.ref_logprobs_BT is not None:
            divergence = kl_estimate(self.kl_estimator, policy.logprobs_BT, batch.ref_logprobs_BT)
            if self.kl_importance_weighted:
                divergence = token_ratio(batch, policy) * divergence
            per_token = per_token + self.kl_beta * divergence
        return weighted_loss(batch, policy, per_token, clipped, self.token_weights(batch))


class PlacedKL(LossKL):
    """A KL penalty in the loss, or in the reward of each completion: the sum over its tokens, at the sampling policy,
    before the group is compared. There k1 alone has the gradient of KL(policy, reference), that through later tokens
    included (arXiv:2512.21852). With rewards of steps it is paid at the last token."""

    objective = {"kl": f"{LossKL.objective['kl']}; or its sum over a row, before the group is compared (kl_in)"}

    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="place of the KL; in the reward k1 has the gradient of KL(policy, reference)"
    )

    @model_validator(mode="after")
    def _a_reward_has_no_ratio(self) -> Self:
        if self.kl_in == "reward" and self.kl_importance_weighted:
            raise ValueError(
                "algorithm.kl_importance_weighted must be false with algorithm.kl_in=reward, where the ratio is 1, got "
                "true; leave it out"
            )
        return self

    @property
    def needs_old_logprobs(self) -> bool:
        return self.kl_in == "reward" and self.kl_beta > 0

    def paid(self, batch: Batch) -> Batch:
        """The batch with rewards less the KL, if it stands there."""
        if self.kl_in == "loss" or batch.ref_logprobs_BT is None:
            return batch
        assert batch.old_logprobs_BT is not None
        divergence_BT = kl_estimate(self.kl_estimator, batch.old_logprobs_BT, batch.ref_logprobs_BT)
        cost_B, mask = self.kl_beta * divergence_BT.sum(dim=1), batch.completion_mask_BT
        batch = batch.replace(rewards_B=batch.rewards_B - cost_B)
        if batch.step_rewards_BT is None:
            return batch
        assert batch.step_ends_BT is not None
        ends_BT = batch.step_ends_BT | (at_last_token(cost_B.new_ones(len(cost_B)), mask) > 0)
        steps_BT = batch.step_rewards_BT - at_last_token(cost_B, mask)
        return batch.replace(step_rewards_BT=steps_BT, step_ends_BT=ends_BT)

    def total(
        self, batch: Batch, policy: PolicyOutput, per_token: Tensor, clipped: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self.kl_in == "loss":
            return super().total(batch, policy, per_token, clipped)
        return weighted_loss(batch, policy, per_token, clipped, self.token_weights(batch))


class GroupStandardised(LossKL):
    """The group's rewards are standardised (arXiv:2402.03300, section 4.1.2)."""

    min_group_size = 2
    objective = {"advantage": "(r - mean) / (std + std_floor) in the group"}

    std_floor: float = Field(default=1e-4, gt=0, description="constant added to the deviation in the denominator")

    def advantages(self, batch: Batch) -> Batch:
        return group_advantages(batch, lambda rewards, mask: group_standardised(rewards, self.std_floor, mask))


class ClippedLoss(Clip, LossKL):
    """The clipped surrogate of each token's ratio (PPO, arXiv:1707.06347, eq. 7)."""

    objective = {"clip": Clip.objective["clip"]}

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        return self.total(batch, policy, *self.clipped(token_ratio(batch, policy), batch))


class SummedLoss(LossKL):
    """The sum over a completion's tokens, divided by a constant, so that no answer's length rescales its gradient."""

    objective = {"aggregation": "sum over all tokens / (rows * loss_denominator)"}

    loss_denominator: float = Field(
        default=128.0, gt=0, description="divides the sum over a completion's tokens; in the paper the token limit"
    )

    def token_weights(self, batch: Batch) -> Tensor:
        return super().token_weights(batch) * batch.completion_mask_BT.sum(dim=1, keepdim=True) / self.loss_denominator


class TokenMean(Algorithm):
    """The mean over all tokens of a minibatch (DAPO, arXiv:2503.14476, eq. 12)."""

    objective = {"aggregation": "mean over all tokens"}

    def loss_weights(self, completion_mask_BT: Tensor) -> Tensor:
        return completion_mask_BT / completion_mask_BT.sum().clamp(min=1)
