"""Credit goes to right answers in proportion to how rare they are in their group, so that hard problems count more.

Maximum likelihood reinforcement learning: Tajwar et al. 2026 (MaxRL, arXiv:2602.02710). The log-likelihood of a right
answer is log p = -sum over k of (1 - p)^k / k, and its gradient sums pass@k's gradient / k over k; with 0 / 1 rewards
the mean score of a group's K right answers has the expectation of the first G terms. Less the group's mean score, as
here, it is sum over i of (r_i - mean) / mean * score_i / G: GRPO's advantage with the mean in place of the standard
deviation, 0 where nothing is right (so the expectation has the first G - 1 terms). verl 0.9.1 and TRL 1.16 have no such
advantage. Departures: the paper pays 0 / 1 alone, and with rewards below 0 a mean may be the residue of rounding, so
the mean counts at least as max |r| / count, as if one answer were right, which changes nothing where no reward is below
0 and keeps an advantage below 2 * count everywhere; 0 where no reward is above 0; the sum over a completion's tokens,
which the score is, is divided by a constant, as in Dr. GRPO.
"""

from typing import Literal

from ..harness.base.tensors import ROUNDING
from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class MaxRL(F.ClipSettings, F.SumSettings, F.LossKLSettings):
    """The group's centred rewards divided by their mean, which approaches maximum likelihood (MaxRL)."""

    min_group_size = 2
    objective = {"advantage": "(r - mean) / max(mean, max |r| / count) in the group, 0 where no r is positive"}
    name: Literal["maxrl"] = "maxrl"

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages_BT=F.group_advantages(batch, _by_the_mean))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT, clipped_BT = F.clipped_surrogate(batch, F.token_ratio(batch, policy), *self.clip)
        loss_BT = loss_BT + F.kl_penalty(batch, policy, *self.kl)
        return F.weighted_loss(batch, policy, loss_BT, clipped_BT, F.summed_weights(batch, self.loss_denominator))


def _by_the_mean(rewards_PG: Tensor, mask_PG: Tensor | None) -> Tensor:
    centred, mask = F.group_centred(rewards_PG, mask_PG), F.counted(rewards_PG, mask_PG)
    paid, count = rewards_PG * mask, mask.sum(dim=1, keepdim=True)  # NaN of none, left out below
    largest = paid.abs().amax(dim=1, keepdim=True)
    mean = (paid.sum(dim=1, keepdim=True) / count).maximum(largest / count)
    return (centred / mean).where(paid.amax(dim=1, keepdim=True) > ROUNDING * largest, 0.0)
