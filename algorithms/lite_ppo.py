"""Credit goes to answers that beat their group, on one scale for the whole batch and equally to every token.

Lite PPO: Liu et al. 2025 ("Tricks or Traps?", arXiv:2508.08221): of all tricks only two, on PPO's clipped loss without
a critic: rewards less the mean of their group, divided by the standard deviation of the batch's rewards, and the mean
over all tokens. So a group with one odd answer out is not scaled up, as the group's own small deviation would do.
Departures: the standard deviation has n - 1 and GRPO's floor, as TRL's `scale_rewards="batch"`; the mean is over the
tokens of a minibatch; no KL by default.
"""

from functools import partial
from typing import Literal

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class LitePPO(F.ClipSettings, F.LossKLSettings):
    """GRPO with the group's mean, the batch's deviation and a mean over all tokens (Lite PPO)."""

    min_group_size = 2
    token_mean = True
    objective = {"advantage": "(r - mean in the group) / (std + 0.0001) of the batch"}
    name: Literal["lite_ppo"] = "lite_ppo"

    def advantages(self, batch: Batch) -> Batch:
        standardised = partial(F.group_standardised, of_batch=True)
        return batch.replace(advantages_BT=F.group_advantages(batch, standardised))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT, clipped_BT = F.clipped_surrogate(batch, F.token_ratio(batch, policy), *self.clip)
        return F.weighted_loss(batch, policy, loss_BT + F.kl_penalty(batch, policy, *self.kl), clipped_BT)
