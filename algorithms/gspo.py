"""Credit goes to answers that beat their group; an answer is kept or dropped as a whole when the policy has moved.

Group Sequence Policy Optimization: Zheng et al. 2025 (arXiv:2507.18071), eq. 5 (clipped surrogate on a ratio of the
sequence, mean over completions), eq. 6 (GRPO's advantage), eq. 7 (the ratio: geometric mean of the token ratios). It
has the paper's GSPO-token form (section 4.3): each token carries its sequence's ratio and the gradient of its own
log-prob, which is eq. 5 in value, clip and gradient if all tokens of a row share one advantage. No KL by default, as in
eq. 5. Departures: as in GRPO.
"""

from typing import Literal

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class GSPO(F.RowClipSettings, F.LossKLSettings):
    """GRPO whose ratio and clip belong to the whole completion (GSPO)."""

    min_group_size = 2
    objective = {"advantage": "(r - mean) / (std + 0.0001) in the group"}
    name: Literal["gspo"] = "gspo"

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages_BT=F.group_advantages(batch, F.group_standardised))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT, clipped_BT = F.clipped_surrogate(batch, F.mean_row_ratio(batch, policy), *self.clip)
        return F.weighted_loss(batch, policy, loss_BT + F.kl_penalty(batch, policy, *self.kl), clipped_BT)
