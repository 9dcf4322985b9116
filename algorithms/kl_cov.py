"""Credit goes to answers that beat their group; the few tokens that would cost most entropy pay for moving.

KL-Cov: Cui et al. 2025 ("The entropy mechanism", arXiv:2505.22617): entropy falls with the covariance of log-prob and
advantage, (log-prob - mean) * (A - mean) of a token, over all tokens. The tokens with the largest covariance pay a
penalty on how far they have moved; the others have GRPO's surrogate without clip. Mean over all tokens, as verl; the
share is 0.002 for the paper's 7B model (0.0002 for 32B, and by default in verl) and the penalty weighs 1. As in verl's
code, which follows the authors', the penalty is |log-ratio|, not a KL: it and its gradient are 0 until the policy has
moved, so with one update per batch nothing is held. Departures: tokens are chosen once, by the sampling policy over the
whole batch (verl: in each micro-batch by the current one, so that the loss depends on its split); a token without
positive covariance is never held.
"""

from typing import Literal

from pydantic import Field

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class KLCov(F.LossKLSettings):
    """GRPO without clip, with a penalty on the moves of tokens of high covariance (KL-Cov)."""

    min_group_size = 2
    needs_old_logprobs = True
    token_mean = True
    objective = {
        "advantage": "(r - mean) / (std + 0.0001) in the group",
        "clip": "none; penalty * |log-ratio| on the covariance_share of tokens with the largest covariance, "
        "positive covariance only",
    }
    name: Literal["kl_cov"] = "kl_cov"
    covariance_share: float = Field(
        default=0.002, gt=0, le=1, description="share of the tokens, of largest covariance, that pay the penalty"
    )
    penalty: float = Field(default=1.0, ge=0, description="weight of |log-ratio| (nats) on these tokens")

    def advantages(self, batch: Batch) -> Batch:
        mask, advantages_BT = batch.completion_mask_BT, F.group_advantages(batch, F.group_standardised)
        credit, logprobs = advantages_BT[mask], batch.old_logprobs_BT[mask]
        covariance = (credit - credit.mean()) * (logprobs - logprobs.mean())
        held = mask.new_zeros(len(covariance))
        held[covariance.topk(min(len(held), max(1, int(len(held) * self.covariance_share)))).indices] = True
        held_BT = mask.new_zeros(mask.shape).masked_scatter(mask, held & (covariance > 0))
        return batch.replace(advantages_BT=advantages_BT, held_BT=held_BT)

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        moved_BT = (policy.logprobs_BT - batch.old_logprobs_BT).abs()
        loss_BT = self.penalty * moved_BT * batch.held_BT - F.token_ratio(batch, policy) * batch.advantages_BT
        return F.weighted_loss(batch, policy, loss_BT + F.kl_penalty(batch, policy, *self.kl))
