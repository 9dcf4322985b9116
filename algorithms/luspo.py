"""Credit goes to answers that beat their group, kept or dropped as a whole, and each token of a long answer weighs as
much as one of a short answer.

Length-Unbiased Sequence Policy Optimization: 2026 (LUSPO, arXiv:2602.05261): GSPO, whose mean over a completion's
tokens gives long answers a smaller gradient per token, with each completion's loss multiplied by its length. TRL has
the same loss (`loss_type="luspo"`). Departures are GSPO's.
"""

from typing import Literal

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class LUSPO(F.RowClipSettings, F.LossKLSettings):
    """GSPO with the loss of each completion times its length (LUSPO)."""

    min_group_size = 2
    objective = {
        "advantage": "(r - mean) / (std + 0.0001) in the group",
        "aggregation": "sum over a row's tokens, then mean over rows",
    }
    name: Literal["luspo"] = "luspo"

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages_BT=F.group_advantages(batch, F.group_standardised))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT, clipped_BT = F.clipped_surrogate(batch, F.mean_row_ratio(batch, policy), *self.clip)
        loss_BT = loss_BT + F.kl_penalty(batch, policy, *self.kl)
        return F.weighted_loss(batch, policy, loss_BT, clipped_BT, F.summed_weights(batch, 1.0))
