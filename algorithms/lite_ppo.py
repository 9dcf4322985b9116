"""Credit goes to answers that beat their group, on one scale for the whole batch and equally to every token.

Lite PPO: Liu et al. 2025 ("Tricks or Traps?", arXiv:2508.08221): of all tricks only two, on PPO's clipped loss without
a critic: rewards less the mean of their group, divided by the standard deviation of the batch's rewards, and the mean
over all tokens. So a group with one odd answer out is not scaled up, as the group's own small deviation would do. It is
`grpo` with `std_over: batch`, without KL, in DAPO's aggregation. Departures: the standard deviation has n - 1 and
GRPO's floor, as TRL's `scale_rewards="batch"`; the mean is over the tokens of a minibatch. Process rewards are as in
GRPO.
"""

from typing import Literal

from ..harness.data import Batch
from ._advantages import group_advantages, group_standardised
from ._surrogate import ClippedLoss, GroupStandardised, TokenMean


class LitePPO(ClippedLoss, GroupStandardised, TokenMean):
    """GRPO with the group's mean, the batch's deviation and a mean over all tokens (Lite PPO)."""

    objective = {"advantage": "(r - mean in the group) / (std + std_floor) of the batch"}

    name: Literal["lite_ppo"] = "lite_ppo"

    def advantages(self, batch: Batch) -> Batch:
        return group_advantages(batch, lambda r, mask: group_standardised(r, self.std_floor, mask, of_batch=True))
