"""Credit goes to tokens of answers that beat a baseline of their place, in which answers that were uncertain so far
count more.

Optimal token baseline: 2026 (OTB, arXiv:2602.07078): the baseline of least variance differs from token to token. It is
sum(W * r) / sum(W) over the group, W the squared length of the gradient of an answer's log-prob up to the token. Its
proxy is the gradient by the logits, as if different tokens' gradients were orthogonal: the sum of 1 - 2 p + (sum of p^2
over the vocabulary), from one forward pass more, which is charged. No deviation, and no KL by default; the clip binds
from the second update of a batch on. Process rewards count with their total. Departures: a group's mean is taken off
its rewards first, so that equal ones are exact zeros; it stays the baseline where one answer is left, which would be
its own (some versions of verl have 0); the sum over a completion's tokens is divided by a constant, as in Dr. GRPO
(verl: any aggregation); W takes no weights for the engine's mismatch."""

from typing import Literal

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F

LEAST = 1e-8  # of a sum of weights, as verl adds


class OptimalTokenBaseline(F.ClipSettings, F.SumSettings, F.LossKLSettings):
    """The reward less a baseline for each place in the answer, weighted by uncertainty so far (OTB)."""

    min_group_size = 2
    needs_collision = needs_old_logprobs = True
    objective = {
        "advantage": "r - sum(W * r) / sum(W) in the group at each place, W the sum of 1 - 2 p + sum of p^2 up to there"
    }
    name: Literal["optimal_token_baseline"] = "optimal_token_baseline"

    def advantages(self, batch: Batch) -> Batch:
        mask_BT, old_BT, collision_BT = batch.completion_mask_BT, batch.old_logprobs_BT, batch.collision_BT
        energy_BT = (1 - 2 * old_BT.exp() + collision_BT).clamp(min=0)  # rounding at p = 1, and -1 beside completions
        shape = (-1, batch.group_size, mask_BT.shape[1])
        weight_PGT = (energy_BT.cumsum(dim=1) * mask_BT).view(shape)
        centred_PG1 = F.group_centred(batch.rewards_PG)[..., None]
        total_P1T = weight_PGT.sum(dim=1, keepdim=True).clamp(min=LEAST)
        baseline_P1T = (weight_PGT * centred_PG1).sum(dim=1, keepdim=True) / total_P1T
        has_others = mask_BT.view(shape).sum(dim=1, keepdim=True) > 1
        advantages_PGT = centred_PG1 - baseline_P1T.where(has_others, 0.0)
        return batch.replace(advantages_BT=advantages_PGT.view(mask_BT.shape) * mask_BT)

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT, clipped_BT = F.clipped_surrogate(batch, F.token_ratio(batch, policy), *self.clip)
        loss_BT = loss_BT + F.kl_penalty(batch, policy, *self.kl)
        return F.weighted_loss(batch, policy, loss_BT, clipped_BT, F.summed_weights(batch, self.loss_denominator))
