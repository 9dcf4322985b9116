"""Credit goes to answers that beat the policy's greedy answer; needs no critic and no group.

ReMax: Li et al. 2023 (arXiv:2310.10505), algorithm 1: REINFORCE with the reward of the greedy answer to the same prompt
as its baseline, which depends on no sampled answer and so leaves the gradient without bias. The greedy answer costs one
completion more per prompt, which is generated, graded and charged like any other but not trained on. It is rewarded
alone: a reward that compares answers, such as `majority_vote`, has nothing to compare there. Process rewards count with
their total. Departures: the paper's KL is in the reward of each token, here in the loss; a ratio under PPO's clip
follows later updates of a batch, as in verl; the sum over a completion's tokens is divided by a constant, as in Dr.
GRPO (verl: by default the mean over all tokens).
"""

from typing import Literal

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class ReMax(F.ClipSettings, F.SumSettings, F.LossKLSettings):
    """REINFORCE with the reward of the greedy answer as baseline (ReMax)."""

    needs_greedy = True
    objective = {"advantage": "r - reward of the prompt's greedy answer"}
    name: Literal["remax"] = "remax"

    def advantages(self, batch: Batch) -> Batch:
        lead_B = batch.rewards_B - batch.greedy_rewards_B
        return batch.replace(advantages_BT=lead_B[:, None] * batch.completion_mask_BT)

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT, clipped_BT = F.clipped_surrogate(batch, F.token_ratio(batch, policy), *self.clip)
        loss_BT = loss_BT + F.kl_penalty(batch, policy, *self.kl)
        return F.weighted_loss(batch, policy, loss_BT, clipped_BT, F.summed_weights(batch, self.loss_denominator))
