"""Credit moves probability between the answers of a group towards a target, and ends where the policy has reached it.

Target Policy Optimization: Kaddour 2026 (TPO, arXiv:2604.06159). Each answer has a share p of its group's probability
(eq. 1: a softmax of log-probs, each the sum over an answer's tokens). The target q is proportional to p_old *
exp(u / target_temperature) (eq. 2), u = (r - mean) / std with count in the denominator (appendix A), and the loss is
the cross-entropy -sum of q log p (eq. 3), whose gradient by an answer's log-prob is p - q. Process rewards count with
their total. Of long answers, whose log-probs lie far apart, one may hold nearly all of p, and little is learnt.

Rows reach the loss apart (micro-batches, minibatches), so a row's loss has the log-probs of the others as sampled: at
the first update of a batch value and gradient are those of eq. 3. Departure: later a row follows its own moves alone.
"""

from typing import Literal

from pydantic import Field

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F

FURTHEST = -15.0  # nats; below it float32 would round 1 - p + p * exp(moved) to 0 for a p of almost 1


class TPO(F.LossKLSettings):
    """Cross-entropy to a target: the old policy over the answers of a group, tilted by their rewards (TPO)."""

    min_group_size = 2
    linear_in_advantages = False
    needs_old_logprobs = True
    objective = {
        "advantage": "q - p of the group's probability: p the old share, q by p * exp((r - mean) / std / "
        "target_temperature)",
        "aggregation": "cross-entropy of p to q in the group, mean over groups",
    }
    name: Literal["tpo"] = "tpo"
    target_temperature: float = Field(default=1.0, gt=0, description="the paper's eta: a higher one moves less")

    def advantages(self, batch: Batch) -> Batch:
        centred_PG = F.group_centred(batch.rewards_PG)
        std_P1 = (centred_PG**2).mean(dim=1, keepdim=True).sqrt()
        log_share_PG = batch.old_logprobs_BT.sum(dim=1).view_as(centred_PG).log_softmax(dim=1)
        target_PG = (log_share_PG + centred_PG / std_P1 / self.target_temperature).softmax(dim=1)
        push_PG = (target_PG - log_share_PG.exp()).where(std_P1 > 0, 0.0)  # NaN of equal rewards, left out
        advantages_BT = push_PG.reshape(-1, 1) * batch.completion_mask_BT
        return batch.replace(advantages_BT=advantages_BT, log_share_B=log_share_PG.reshape(-1))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        first_B1 = batch.completion_mask_BT.int().argmax(dim=1, keepdim=True)
        log_share_B1, moved_B1 = batch.log_share_B[:, None], F.row_log_ratio(batch, policy)
        share_B1 = log_share_B1.exp()
        target_B1 = share_B1 + batch.advantages_BT.gather(1, first_B1)
        # log(1 - p + p * exp(moved)): the group, with the others as they were; its gradient at 0 is p exactly
        whole_B1 = (share_B1 * moved_B1.clamp(min=FURTHEST).expm1()).log1p()
        loss_B1 = whole_B1 - target_B1 * (log_share_B1 + moved_B1)
        return F.weighted_loss(batch, policy, batch.group_size * loss_B1 + F.kl_penalty(batch, policy, *self.kl))
