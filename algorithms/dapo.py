"""Credit goes to answers that beat their group, equally to every token of the batch, with a higher upper clip.

Decoupled Clip and Dynamic sAmpling Policy Optimization: Yu et al. 2025 (arXiv:2503.14476), eq. 9 (GRPO's advantage),
eq. 10 (clip-higher: unlikely tokens may gain more probability than the symmetric clip allows), eq. 12 (mean over all
tokens, so that a token of a long answer counts as much as any other), section 2.3 (no KL) and eq. 13 (soft penalty for
overlong answers: the reward `overlong`, paid by default). Departures: dynamic sampling (eq. 11) and the filter of cut
completions (section 3.4) are settings of the run, `dynamic_sampling` and `overlong: mask`, off by default, so a group
of equal rewards stays in the batch, without gradient; the mean is over the tokens of a minibatch; accuracy is 1 / 0,
not 1 / -1, so the penalty weighs 0.5, not 1, and the two act as in the paper once they are standardised; as in GRPO.
"""

from typing import Literal

from pydantic import Field

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class DAPO(F.ClipSettings, F.LossKLSettings):
    """GRPO with a higher upper clip, a mean over all tokens, an overlong penalty and no KL (DAPO)."""

    min_group_size = 2
    default_rewards = {"accuracy": 1.0, "overlong": 0.5}
    token_mean = True
    objective = {"advantage": "(r - mean) / (std + 0.0001) in the group"}
    name: Literal["dapo"] = "dapo"
    clip_epsilon_high: float | None = Field(default=0.28, gt=0, description="ratio's rise above 1; null: clip_epsilon")

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages_BT=F.group_advantages(batch, F.group_standardised))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT, clipped_BT = F.clipped_surrogate(batch, F.token_ratio(batch, policy), *self.clip)
        return F.weighted_loss(batch, policy, loss_BT + F.kl_penalty(batch, policy, *self.kl), clipped_BT)
