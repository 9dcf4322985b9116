"""Credit goes to tokens of answers that beat the whole batch, or their group; no critic.

REINFORCE++: Hu et al. 2025 (arXiv:2501.03262; its versions number their equations differently): a token's advantage is
r - kl_beta * (sum of the KL from there on; k1 per token, inside the reward), normalised by mean and standard deviation
over all tokens of the batch, under PPO's clip. It is PPO with a value of 0 everywhere. A process reward is paid at the
end of its step and reaches the tokens before it. The paper's second variant, REINFORCE++ with baseline, is `baseline:
group` (the group's mean reward is subtracted first) with `kl_placement: loss` and `kl_estimator: k2`. Departures: the
loss is the mean over all tokens of a minibatch, as in PPO here; `gamma` discounts with the baseline too, where verl's
ignores it; a group of one has no baseline and is refused, where verl takes 0.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from ..harness.data import Batch, PolicyOutput, Tensor
from ..harness.ground.tensors import whiten
from ._advantages import at_last_token, group_centred, to_go, token_rewards
from ._losses import KLEstimator, kl_estimate, policy_metrics, token_mean_weights, token_ratio
from ._surrogate import Clip


class ReinforcePlusPlus(Clip):
    """Reward to go normalised over the batch, per-token KL in the reward, PPO's clip, no critic (REINFORCE++)."""

    objective: ClassVar[Mapping[str, str]] = {
        "advantage": "(reward to go - mean) / std over the batch's tokens (less the group's mean first: baseline)",
        "aggregation": "mean over all tokens",
        "clip": "ratio of each token, 1 - clip_epsilon to 1 + clip_epsilon_high, at most ratio_bound",
        "kl": "kl_beta * kl_estimator to the reference, in the reward of each token (or kl_placement)",
        "correction": "none",
    }

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    kl_beta: float = Field(default=0.01, ge=0, description="weight of the KL to the frozen reference; 0: none")
    kl_estimator: KLEstimator = Field(default="k1", description="per-token KL estimator; use k2 with kl_placement=loss")
    kl_placement: Literal["reward", "loss"] = Field(
        default="reward", description="subtract the KL from each token's reward, or add it to the loss"
    )
    gamma: float = Field(default=1.0, ge=0, le=1, description="discount per token in the reward to go")
    baseline: Literal["none", "group"] = Field(
        default="none", description="group: first subtract the group's mean reward"
    )

    @model_validator(mode="after")
    def _a_group_has_others(self) -> Self:
        if self.baseline == "group" and self.group_size == 1:
            raise ValueError("algorithm.group_size must be at least 2 with algorithm.baseline=group, got 1")
        return self

    @property
    def needs_old_logprobs(self) -> bool:
        return self.kl_beta > 0 and self.kl_placement == "reward"

    def advantages(self, batch: Batch) -> Batch:
        paid, mask = batch, batch.completion_mask_BT
        if self.baseline == "group":
            centred_B = group_centred(batch.rewards_PG).flatten()  # with steps their rewards stay, less the mean
            steps, mean_B = batch.step_rewards_BT, batch.rewards_B - centred_B
            paid = paid.replace(rewards_B=centred_B)
            if steps is not None:
                paid = paid.replace(step_rewards_BT=steps - at_last_token(mean_B, mask))
        if self.kl_placement == "loss":
            paid = paid.replace(ref_logprobs_BT=None)
        rewards_BT = token_rewards(paid, self.kl_beta, self.kl_estimator)
        return batch.replace(advantages_BT=whiten(to_go(rewards_BT, self.gamma), mask))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.loss_weight_BT is not None
        per_token, clipped = self.clipped(token_ratio(batch, policy), batch)
        if self.kl_placement == "loss" and batch.ref_logprobs_BT is not None:
            divergence = kl_estimate(self.kl_estimator, policy.logprobs_BT, batch.ref_logprobs_BT)
            per_token = per_token + self.kl_beta * divergence
        loss = (batch.loss_weight_BT * per_token).sum()
        return loss, {"policy/loss": loss.detach(), **policy_metrics(batch, policy, clipped)}

    def loss_weights(self, completion_mask_BT: Tensor) -> Tensor:
        return token_mean_weights(completion_mask_BT)
