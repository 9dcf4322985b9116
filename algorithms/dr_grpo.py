"""Credit goes to answers that beat their group, by as much as they beat it: neither the spread of a group's rewards
nor the length of an answer rescales it.

GRPO done right: Liu et al. 2025 (arXiv:2503.20783), section 3.2. Two divisions of GRPO are left out because they bias
the gradient: by the group's standard deviation (advantage = r - mean, which is (G - 1) / G of the unbiased
leave-one-out advantage) and by a completion's length (one constant divides the sum over its tokens, as the generation
limit does in the paper's listing). Process rewards are centred over the steps of the group. Departure: the constant is
a setting, because an algorithm does not know the run's token limit. The KL is off by default, as in the paper's runs,
and can stand in the loss or in the reward.
Reported metrics stay means (over a row's tokens, then over rows).
"""

from typing import Literal

from ..harness.data import Batch
from ._advantages import group_advantages, group_centred
from ._surrogate import ClippedLoss, PlacedKL, SummedLoss


class DrGRPO(ClippedLoss, PlacedKL, SummedLoss):
    """GRPO without division by the group's deviation or the answer's length (Dr. GRPO)."""

    min_group_size = 2
    objective = {"advantage": "r - mean in the group"}

    name: Literal["dr_grpo"] = "dr_grpo"

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages_BT=group_advantages(self.paid(batch), group_centred).advantages_BT)
