"""Credit goes to answers that beat their group, and fades out smoothly for answers that have moved away as a whole.

Variational sequence-level soft policy optimization: 2026 (VESPO, arXiv:2602.10693): the log-prob of each token times
the advantage times a weight of the whole completion, w^k exp(lambda (1 - w)) with its ratio w (the product of its token
ratios). The weight is 1 at w = 1, carries no gradient and goes to 0 on both sides, faster above for negative advantages
(k = 3, lambda = 2 against 2 and 3). Constants, the mean over all tokens and GRPO's advantage are as in TRL
(`loss_type="vespo"`). Departures: TRL limits each token's log-ratio to 20; as in GRPO; no KL by default.
"""

from typing import Literal

from pydantic import Field

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class VESPO(F.LossKLSettings):
    """REINFORCE on group-standardised rewards with a soft weight of the whole completion's ratio (VESPO)."""

    min_group_size = 2
    token_mean = True
    objective = {
        "advantage": "(r - mean) / (std + 0.0001) in the group",
        "clip": "weight of each row, ratio^k * exp(lambda * (1 - ratio)); ratio: product of its tokens'",
    }
    name: Literal["vespo"] = "vespo"
    k_positive: float = Field(default=2.0, ge=0, description="power of the ratio where the advantage is 0 or more")
    lambda_positive: float = Field(default=3.0, gt=0, description="the weight's decay where the advantage is 0 or more")
    k_negative: float = Field(default=3.0, ge=0, description="power of the ratio where the advantage is negative")
    lambda_negative: float = Field(default=2.0, gt=0, description="the weight's decay where the advantage is negative")

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages_BT=F.group_advantages(batch, F.group_standardised))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio_B1 = F.row_log_ratio(batch, policy).detach()
        excess_B1 = 1 - log_ratio_B1.exp()
        up_B1 = self.k_positive * log_ratio_B1 + self.lambda_positive * excess_B1
        down_B1 = self.k_negative * log_ratio_B1 + self.lambda_negative * excess_B1
        loss_BT = F.reinforced(batch, policy, up_B1.where(batch.advantages_BT >= 0, down_B1).exp())
        return F.weighted_loss(batch, policy, loss_BT + F.kl_penalty(batch, policy, *self.kl))
