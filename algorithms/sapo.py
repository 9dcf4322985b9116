"""Credit goes to answers that beat their group, and fades out smoothly for tokens that have moved away.

Soft adaptive policy optimization: Gao et al. 2025 (SAPO, arXiv:2511.20347): in place of PPO's clip, each token's ratio
r passes a gate 4 / tau * sigmoid(tau * (r - 1)). Its slope is 1 at r = 1 and falls off on both sides, faster for
tokens with an advantage of 0 or less (tau 1.05 against 1), because those spread probability over many other tokens.
Mean over a row's tokens, then over rows, and GRPO's advantage, as in the paper, verl and TRL. At r = 1 the gate is
2 / tau, not 1: a constant in the loss. Departures: as in GRPO; no KL by default.
"""

from typing import Literal

from pydantic import Field

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class SAPO(F.LossKLSettings):
    """GRPO with a smooth gate on each token's ratio in place of the clip (SAPO)."""

    min_group_size = 2
    objective = {
        "advantage": "(r - mean) / (std + 0.0001) in the group",
        "clip": "gate on the ratio of each token, 4 / tau * sigmoid(tau * (ratio - 1))",
    }
    name: Literal["sapo"] = "sapo"
    tau_positive: float = Field(default=1.0, gt=0, description="steepness of the gate where the advantage is above 0")
    tau_negative: float = Field(default=1.05, gt=0, description="steepness of the gate elsewhere; larger: fades faster")

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages_BT=F.group_advantages(batch, F.group_standardised))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        negative_BT = batch.advantages_BT.new_full(batch.advantages_BT.shape, self.tau_negative)
        tau_BT = negative_BT.masked_fill(batch.advantages_BT > 0, self.tau_positive)
        gate_BT = 4 / tau_BT * (tau_BT * (F.token_ratio(batch, policy) - 1)).sigmoid()
        loss_BT = -gate_BT * batch.advantages_BT + F.kl_penalty(batch, policy, *self.kl)
        return F.weighted_loss(batch, policy, loss_BT)
