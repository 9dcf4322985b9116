"""Credit goes to answers that beat their group, by as much as they beat it: neither the spread of a group's rewards nor
the length of an answer rescales it.

GRPO done right: Liu et al. 2025 (arXiv:2503.20783), section 3.2. Two divisions of GRPO are left out because they bias
the gradient: by the group's standard deviation (advantage = r - mean, which is (G - 1) / G of the unbiased
leave-one-out advantage) and by a completion's length (one constant divides the sum over its tokens, as the generation
limit does in the paper's listing). Process rewards are centred over the steps of the group. Departure: the constant is
a setting, because an algorithm does not know the run's token limit. The KL is off by default, as in the paper's runs,
and can stand in the loss or in the reward. Reported metrics stay means (over a row's tokens, then over rows).
"""

from typing import Literal

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class DrGRPO(F.ClipSettings, F.SumSettings, F.PlacedKLSettings):
    """GRPO without division by the group's deviation or the answer's length (Dr. GRPO)."""

    min_group_size = 2
    objective = {"advantage": "r - mean in the group"}
    name: Literal["dr_grpo"] = "dr_grpo"

    def advantages(self, batch: Batch) -> Batch:
        paid = F.rewards_less_kl(batch, self.kl_beta, self.kl_estimator) if self.kl_in == "reward" else batch
        return batch.replace(advantages_BT=F.group_advantages(paid, F.group_centred))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT, clipped_BT = F.clipped_surrogate(batch, F.token_ratio(batch, policy), *self.clip)
        if self.kl_in == "loss":
            loss_BT = loss_BT + F.kl_penalty(batch, policy, *self.kl)
        return F.weighted_loss(batch, policy, loss_BT, clipped_BT, F.summed_weights(batch, self.loss_denominator))
