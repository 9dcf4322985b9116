"""Credit goes to tokens of answers that beat the whole batch; no critic, and no group is needed.

REINFORCE++: Hu et al. 2025 (arXiv:2501.03262; its versions number their equations differently): a token's advantage is
r - kl_beta * (sum of the KL from there on; k1 per token, inside the reward), normalised by mean and standard deviation
over all tokens of the batch, under PPO's clip. It is PPO with a value of 0 everywhere. A process reward is paid at the
end of its step and reaches the tokens before it. Departures: the loss is the mean over all tokens of a minibatch, as in
PPO here; of the paper's second variant the group-mean baseline is left out, and its k2 in the loss can be set.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from algorithms._advantages import to_go, token_rewards
from algorithms._losses import (
    KLEstimator,
    clipped_surrogate,
    kl_estimate,
    policy_metrics,
    token_mean_weights,
    token_ratio,
)
from harness.interfaces import Algorithm
from harness.tensors import whiten
from harness.types import Batch, PolicyOutput


class ReinforcePlusPlus(Algorithm):
    """Reward to go normalised over the batch, per-token KL in the reward, PPO's clip, no critic (REINFORCE++)."""

    objective: ClassVar[Mapping[str, str]] = {
        "advantage": "(reward to go - mean) / std over the batch's tokens",
        "aggregation": "mean over all tokens",
        "clip": "ratio of each token, 1 - clip_epsilon to 1 + clip_epsilon",
        "kl": "kl_beta * kl_estimator to the reference, in the reward of each token (or kl_placement)",
        "correction": "none",
    }

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    clip_epsilon: float = Field(0.2, gt=0, lt=1, description="binds only when a batch gets more than one update")
    kl_beta: float = Field(default=0.01, ge=0, description="weight of the KL to the frozen reference; 0: none")
    kl_estimator: KLEstimator = Field(default="k1", description="per-token estimate of that KL; in the loss take k2")
    kl_placement: Literal["reward", "loss"] = Field(default="reward", description="where the KL is subtracted or added")

    @property
    def needs_old_logprobs(self) -> bool:
        return self.kl_beta > 0 and self.kl_placement == "reward"

    def advantages(self, batch: Batch) -> Batch:
        paid = batch if self.kl_placement == "reward" else batch.replace(ref_logprobs_BT=None)
        rewards_BT = token_rewards(paid, self.kl_beta, self.kl_estimator)
        return batch.replace(advantages_BT=whiten(to_go(rewards_BT), batch.completion_mask_BT))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.advantages_BT is not None and batch.loss_weight_BT is not None
        per_token, clipped = clipped_surrogate(token_ratio(batch, policy), batch.advantages_BT, self.clip_epsilon)
        if self.kl_placement == "loss" and batch.ref_logprobs_BT is not None:
            divergence = kl_estimate(self.kl_estimator, policy.logprobs_BT, batch.ref_logprobs_BT)
            per_token = per_token + self.kl_beta * divergence
        loss = (batch.loss_weight_BT * per_token).sum()
        return loss, {"policy/loss": loss.detach(), **policy_metrics(batch, policy, clipped)}

    def loss_weights(self, completion_mask_BT: Tensor) -> Tensor:
        return token_mean_weights(completion_mask_BT)
