"""Credit goes to the best answer of a group and against the worst; other answers, and groups of equal rewards, get
none.

Direct Preference Optimization: Rafailov et al. 2023 (arXiv:2305.18290), eq. 7, on pairs that the policy itself has just
sampled: -log sigmoid(kl_beta * (d_best - d_worst)), d = a completion's log-prob minus the reference's. Ties: the first
of the best and the first of the worst in the group's order. Process rewards count with their total. The mean is over
all groups, those without a pair adding exactly 0.

The two rows of a pair reach the loss apart (micro-batches, minibatches), so each row's loss is eq. 7 with the partner's
log-prob held where it was sampled; a constant (half of the pair's loss then) makes the two add up to eq. 7. For that a
row must know one number, its advantage: +-sigmoid(-kl_beta * (d_best - d_worst)) at the sampling policy. At the first
update of a batch value and gradient equal eq. 7's. Departure: in later updates of the same batch the loss follows
a row's own movement but not its partner's.
"""

from typing import Literal

from pydantic import Field

from ..harness.data import Batch, PolicyOutput, Tensor
from ..harness.interfaces import Algorithm
from . import _functional as F

SMALLEST = 2.0**-24  # a probability of float32 below 1; bounds the reported loss of a hopeless pair


class OnlineDPO(Algorithm):
    """DPO on the best against the worst of each group, sampled from the current policy."""

    min_group_size = 2
    linear_in_advantages = False
    needs_old_logprobs = pairs_rows = True
    objective = {
        "advantage": "+-sigmoid(-kl_beta * margin) for the best and the worst of the group, 0 for the others",
        "aggregation": "sum over a row's tokens, one pair per group, mean over groups",
        "kl": "kl_beta, implied by the loss",
    }
    name: Literal["online_dpo"] = "online_dpo"
    kl_beta: float = Field(default=0.1, gt=0, description="DPO's beta: weight of the KL to the frozen reference")

    def advantages(self, batch: Batch) -> Batch:
        mask = batch.completion_mask_BT
        gain_B = (batch.old_logprobs_BT - batch.ref_logprobs_BT).sum(dim=1)
        gain_PG, rewards_PG = gain_B.view(-1, batch.group_size), batch.rewards_PG
        best_P1, worst_P1 = rewards_PG.argmax(dim=1, keepdim=True), rewards_PG.argmin(dim=1, keepdim=True)
        margin_P1 = gain_PG.gather(1, best_P1) - gain_PG.gather(1, worst_P1)
        push_P1 = (-self.kl_beta * margin_P1).sigmoid()
        # Of equal rewards the first is best and worst at once, and its two signs cancel to exactly 0.
        signed_PG = gain_PG.new_zeros(gain_PG.shape).scatter(1, best_P1, push_P1).scatter_add(1, worst_P1, -push_P1)
        return batch.replace(advantages_BT=signed_PG.reshape(-1, 1) * mask)

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        first_B1 = batch.completion_mask_BT.int().argmax(dim=1, keepdim=True)
        signed_B1 = batch.advantages_BT.gather(1, first_B1)
        push_B1 = signed_B1.abs()
        # -log sigmoid(margin + moved) + log sigmoid(margin), with sigmoid(-margin) = push; 0 where push is 0.
        moved_B1 = self.kl_beta * signed_B1.sign() * F.row_log_ratio(batch, policy)
        change_B1 = (-push_B1).log1p().logaddexp(push_B1.log() - moved_B1)
        per_row_B1 = change_B1 - 0.5 * (1 - push_B1).clamp(min=SMALLEST).log()
        loss, metrics = F.weighted_loss(batch, policy, per_row_B1)
        # Weights of a row add up to 1 / rows; one group has group_size rows.
        return loss * batch.group_size, {**metrics, "policy/loss": loss.detach() * batch.group_size}
