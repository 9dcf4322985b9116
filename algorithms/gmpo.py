"""Credit goes to answers that beat their group; a token that moved far hardly changes the weight of its answer.

Geometric-mean policy optimization: Zhao et al. 2025 (GMPO, arXiv:2507.20673): the objective of a completion is its
advantage times the geometric mean of its tokens' ratios, each clipped before, in log space and on the side that PPO
clips (sign of the advantage), to e^-0.4 .. e^0.4; then the mean over completions. GSPO clips that mean instead. Written
token by token: a token carries the row's mean ratio and the gradient of its own log-prob, 0 where it is clipped. Value
and gradient are the paper's if all tokens of a row share one advantage. Departures: as in GRPO; no KL by default.
"""

from typing import Literal

from pydantic import Field

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class GMPO(F.LossKLSettings):
    """GRPO with the geometric mean of a completion's clipped ratios as its ratio (GMPO)."""

    min_group_size = 2
    objective = {
        "advantage": "(r - mean) / (std + 0.0001) in the group",
        "clip": "ratio of each token, exp(-clip_log_ratio) to exp(clip_log_ratio), before their geometric mean",
    }
    name: Literal["gmpo"] = "gmpo"
    clip_log_ratio: float = Field(default=0.4, gt=0, description="nats by which a token's log-prob may move")

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages_BT=F.group_advantages(batch, F.group_standardised))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        mask, advantages_BT = batch.completion_mask_BT, batch.advantages_BT
        log_ratio_BT = (policy.logprobs_BT - batch.old_logprobs_BT) * mask
        clipped_BT = log_ratio_BT.abs() > self.clip_log_ratio
        clipped_BT &= log_ratio_BT * advantages_BT > 0  # moved further the way that its advantage points
        bounded_BT = log_ratio_BT.clamp(-self.clip_log_ratio, self.clip_log_ratio)
        used_BT = bounded_BT.where(clipped_BT, log_ratio_BT)
        num_tokens_B1 = mask.sum(dim=1, keepdim=True).clamp(min=1)
        row_ratio_B1 = (used_BT.detach().sum(dim=1, keepdim=True) / num_tokens_B1).exp()
        loss_BT = -row_ratio_B1 * (used_BT - used_BT.detach()).exp() * advantages_BT
        return F.weighted_loss(batch, policy, loss_BT + F.kl_penalty(batch, policy, *self.kl), clipped_BT)
