"""Credit goes to whole answers that beat the mean of the other answers to the same prompt; no critic.

REINFORCE leave-one-out: Ahmadian et al. 2024 (arXiv:2402.14740, the RLOO estimator), after Kool et al. 2019. One action
is one completion: its reward is its total reward minus kl_beta times the log-ratio of the whole completion to the
reference (k1 summed over tokens), its baseline the mean reward of the other G - 1, and its log-prob the sum over its
tokens. So the gradient of the expected reward is estimated without bias. Process rewards count with their total.
`baseline: shrinkage` moves the baseline towards the mean of the batch's other groups, by as much as the noise of group
means exceeds their differences: Zeng et al. 2025 (James-Stein baseline, arXiv:2511.03710), which stays without bias.
Departure: the paper takes one step per batch; here, from the second update on, the gradient of a completion is
multiplied by its ratio (the product of its token ratios), which keeps the estimate unbiased, with a variance that grows
with length. `clip_epsilon` clips that ratio as PPO does.
"""

import math
from typing import Literal

from pydantic import Field

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class RLOO(F.RewardKLSettings):
    """REINFORCE on whole completions with a leave-one-out baseline, KL in the reward (RLOO)."""

    min_group_size = 2
    objective = {
        "advantage": "r - mean of the others in the group (shrunk towards the mean of the other groups: baseline)",
        "aggregation": "sum over a row's tokens, then mean over rows",
        "clip": "ratio of each row (product of its tokens'), 1 -+ clip_epsilon; none by default",
        "kl": "kl_beta * k1 to the reference summed over the row, in the reward",
    }
    name: Literal["rloo"] = "rloo"
    clip_epsilon: float | None = Field(default=None, gt=0, description="how far a row's ratio may leave 1; null: any")
    baseline: Literal["group", "shrinkage"] = Field(
        default="group", description="mean of the others in the group; shrinkage: moved towards the other groups' mean"
    )

    def advantages(self, batch: Batch) -> Batch:
        paid = F.rewards_less_kl(batch, self.kl_beta, "k1")
        centre = F.leave_one_out if self.baseline == "group" else F.shrunk_leave_one_out
        return batch.replace(advantages_BT=centre(paid.rewards_PG).reshape(-1, 1) * batch.completion_mask_BT)

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_B1 = F.row_log_ratio(batch, policy).exp()
        clip = math.inf if self.clip_epsilon is None else self.clip_epsilon
        # A row's tokens all carry the row's loss; their weights add up to 1 / rows.
        loss_BT, clipped_BT = F.clipped_surrogate(batch, ratio_B1, 1 - clip, 1 + clip)
        return F.weighted_loss(batch, policy, loss_BT, clipped_BT)
