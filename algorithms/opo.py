"""Credit goes to answers that beat their group's mean reward, in which long answers count more.

On-policy RL with optimal reward baseline: Hao et al. 2025 (OPO, arXiv:2505.23585). The baseline that gives REINFORCE
the least variance is E[|score|^2 r] / E[|score|^2]; if the gradients of tokens are orthogonal and equally long,
|score|^2 is the length l of an answer, so the baseline of a group is sum(l * r) / sum(l). No deviation, no KL and no
clip, as in the paper, which takes one update per batch: the clip here binds from the second on. Process rewards count
with their total. Departure: the sum over a completion's tokens is divided by a constant, as in Dr. GRPO (verl: any
aggregation, by default the mean over all tokens).
"""

from typing import Literal

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class OPO(F.ClipSettings, F.SumSettings, F.LossKLSettings):
    """The reward less the group's mean weighted by length, the baseline of least variance (OPO)."""

    min_group_size = 2
    objective = {"advantage": "r - sum(length * r) / sum(length) in the group"}
    name: Literal["opo"] = "opo"

    def advantages(self, batch: Batch) -> Batch:
        # Of centred rewards, whose differences are the same: equal ones are exact zeros.
        centred_PG = F.group_centred(batch.rewards_PG)
        length_PG = batch.completion_mask_BT.sum(dim=1).view_as(centred_PG)
        total_P1 = length_PG.sum(dim=1, keepdim=True).clamp(min=1)
        baseline_P1 = (length_PG * centred_PG).sum(dim=1, keepdim=True) / total_P1
        return batch.replace(advantages_BT=(centred_PG - baseline_P1).reshape(-1, 1) * batch.completion_mask_BT)

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT, clipped_BT = F.clipped_surrogate(batch, F.token_ratio(batch, policy), *self.clip)
        loss_BT = loss_BT + F.kl_penalty(batch, policy, *self.kl)
        return F.weighted_loss(batch, policy, loss_BT, clipped_BT, F.summed_weights(batch, self.loss_denominator))
