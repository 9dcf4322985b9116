"""Credit goes to tokens of answers that beat the whole batch, or their group; no critic.

REINFORCE++: Hu et al. 2025 (arXiv:2501.03262; its versions number their equations differently): a token's advantage is
r - kl_beta * (sum of the KL from there on; k1 per token, inside the reward), normalised by mean and standard deviation
over all tokens of the batch, under PPO's clip. It is PPO with a value of 0 everywhere. A process reward is paid at the
end of its step and reaches the tokens before it. The paper's second variant, REINFORCE++ with baseline, is `baseline:
group`: the group's mean reward is subtracted first, and the KL is in the loss, by k2. Departures: the loss is the mean
over all tokens of a minibatch, as in PPO here; `gamma` discounts with the baseline too, where verl's ignores it; a
group of one has no baseline and is refused, where verl takes 0.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from ..harness.base.tensors import whiten
from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class ReinforcePlusPlus(F.DiscountSettings, F.ClipSettings):
    """Reward to go normalised over the batch, per-token KL in the reward, PPO's clip, no critic (REINFORCE++)."""

    token_mean = True
    objective = {
        "advantage": "(reward to go - mean) / std over the batch's tokens (less the group's mean first: baseline)",
        "kl": "kl_beta * k1 to the reference, in the reward of each token (k2 beside the clip: baseline)",
    }
    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    baseline: Literal["none", "group"] = Field(
        default="none", description="group: first subtract the group's mean reward; the KL is then k2, in the loss"
    )

    @model_validator(mode="after")
    def _a_group_has_others(self) -> Self:
        if self.baseline == "group" and self.group_size == 1:
            raise ValueError("algorithm.group_size must be at least 2 with algorithm.baseline=group, got 1")
        return self

    @property
    def needs_old_logprobs(self) -> bool:
        return self.kl_beta > 0 and self.baseline == "none"

    def advantages(self, batch: Batch) -> Batch:
        paid, mask = batch, batch.completion_mask_BT
        if self.baseline == "group":
            centred_B = F.group_centred(batch.rewards_PG).flatten()  # with steps their rewards stay, less the mean
            steps, mean_B = batch.step_rewards_BT, batch.rewards_B - centred_B
            paid = paid.replace(rewards_B=centred_B, ref_logprobs_BT=None)
            if steps is not None:
                paid = paid.replace(step_rewards_BT=steps - F.at_last_token(mean_B, mask))
        to_go_BT = F.to_go(F.token_rewards(paid, self.kl_beta), self.gamma)
        return batch.replace(advantages_BT=whiten(to_go_BT, mask))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT, clipped_BT = F.clipped_surrogate(batch, F.token_ratio(batch, policy), *self.clip)
        if self.baseline == "group":
            loss_BT = loss_BT + F.kl_penalty(batch, policy, self.kl_beta, "k2")
        return F.weighted_loss(batch, policy, loss_BT, clipped_BT)
