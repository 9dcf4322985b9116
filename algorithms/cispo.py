"""Credit goes to answers that beat their group, and no token ever loses its gradient to a clip.

Clipped Importance-Sampling Policy Optimization: MiniMax 2025 (MiniMax-M1, arXiv:2506.13585), eq. 4 (log-prob times a
stop-gradient weight times GRPO's advantage, mean over all tokens) and eq. 5 (the weight: the token's ratio, clipped).
The clip limits the weight and does not drop the token, as PPO's does, so rare but decisive tokens still teach after the
first update. No KL and no lower bound, as in the paper. Departures: a weight is cut at 5 (the paper tunes the bound and
gives no value); the mean is over the tokens of a minibatch, not of a group; as in GRPO.
"""

from typing import Literal

from pydantic import Field

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class CISPO(F.LossKLSettings):
    """REINFORCE on group-standardised rewards with clipped importance weights (CISPO)."""

    min_group_size = 2
    token_mean = True
    objective = {
        "advantage": "(r - mean) / (std + 0.0001) in the group",
        "clip": "weight of each token, at most 1 + clip_epsilon_high; its gradient stays",
    }
    name: Literal["cispo"] = "cispo"
    clip_epsilon_high: float = Field(default=4.0, gt=0, description="highest weight is 1 + clip_epsilon_high")

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages_BT=F.group_advantages(batch, F.group_standardised))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_BT = F.token_ratio(batch, policy).detach()
        weight_BT = ratio_BT.clamp(max=1 + self.clip_epsilon_high)
        loss_BT = F.reinforced(batch, policy, weight_BT)
        return F.weighted_loss(batch, policy, loss_BT + F.kl_penalty(batch, policy, *self.kl), weight_BT != ratio_BT)
