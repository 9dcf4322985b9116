"""Credit goes to answers that beat their group in each reward on its own, so that no reward drowns another.

Group reward-Decoupled Normalization Policy Optimization: Liu et al. 2026 (GDPO, arXiv:2601.05242): each reward is
standardised in its group, the results are summed with the rewards' weights, and the sum is standardised over the batch.
GRPO standardises the weighted sum instead, in which different mixtures of rewards can have the same advantage. Loss as
in GRPO. Whole answers: process rewards count with their total; in a control arm its pay alone counts. As in TRL
(`multi_objective_aggregation="normalize_then_sum"`) the batch is its rows; verl's are its tokens. Departures: the
standard deviations have n - 1 and GRPO's floor; no KL by default.
"""

from typing import Literal

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class GDPO(F.ClipSettings, F.LossKLSettings):
    """GRPO with each reward standardised on its own (GDPO)."""

    min_group_size = 2
    objective = {
        "advantage": "sum of weight * (r - mean) / (std + 0.0001) in the group over rewards, then the same over "
        "the batch"
    }
    name: Literal["gdpo"] = "gdpo"

    def advantages(self, batch: Batch) -> Batch:
        parts_BK, weights_BK = batch.reward_parts_BK, batch.reward_weights_BK
        if parts_BK is None:
            parts_BK, weights_BK = batch.rewards_B[:, None], batch.rewards_B.new_ones(len(batch))[:, None]
        own_KPG = parts_BK.T.reshape(-1, *batch.rewards_PG.shape)
        own_BK = F.group_standardised(own_KPG.flatten(0, 1)).view(parts_BK.shape[1], -1).T
        total_1B = (weights_BK * own_BK).sum(dim=1)[None]
        # The mean over the batch is 0 but for rounding, which must not pay groups of equal rewards.
        advantages_B1 = F.group_standardised(total_1B).where(total_1B != 0, 0.0).T
        return batch.replace(advantages_BT=advantages_B1 * batch.completion_mask_BT)

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT, clipped_BT = F.clipped_surrogate(batch, F.token_ratio(batch, policy), *self.clip)
        return F.weighted_loss(batch, policy, loss_BT + F.kl_penalty(batch, policy, *self.kl), clipped_BT)
