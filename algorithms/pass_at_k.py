"""Credit goes to the best answer of a group alone, by as much as it beats the second best.

Pass@k training: Tang et al. 2025 (arXiv:2503.19595): the objective is the expected best reward of k = G answers.
Without answer i the best would be max over j != i of r_j, which does not depend on i and is thus a baseline, so its
advantage is max_j r_j - max_{j != i} r_j: r1 - r2 for the best and 0 for all others, also for two that tie. The sum of
their scores has the true gradient of the expected maximum as its expectation. Process rewards count with their total.
verl's `grpo_passk` divides by the group's standard deviation unless told otherwise. Departure: the sum over tokens is
divided by a constant and by rows, as in Dr. GRPO: the expected gradient is the true one / (G * loss_denominator).
"""

from typing import Literal

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class PassAtK(F.ClipSettings, F.SumSettings, F.LossKLSettings):
    """The best answer of the group earns its lead over the second, which climbs pass@group_size."""

    min_group_size = 2
    objective = {"advantage": "best - second best of the group for the best, 0 for the others"}
    name: Literal["pass_at_k"] = "pass_at_k"

    def advantages(self, batch: Batch) -> Batch:
        top_P2, place_P2 = batch.rewards_PG.topk(2)
        lead_P1 = top_P2[:, :1] - top_P2[:, 1:]
        earned_PG = top_P2.new_zeros(batch.rewards_PG.shape).scatter(1, place_P2[:, :1], lead_P1)
        return batch.replace(advantages_BT=earned_PG.reshape(-1, 1) * batch.completion_mask_BT)

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT, clipped_BT = F.clipped_surrogate(batch, F.token_ratio(batch, policy), *self.clip)
        loss_BT = loss_BT + F.kl_penalty(batch, policy, *self.kl)
        return F.weighted_loss(batch, policy, loss_BT, clipped_BT, F.summed_weights(batch, self.loss_denominator))
