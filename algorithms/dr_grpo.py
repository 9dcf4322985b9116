"""Credit goes to answers that beat their group, by as much as they beat it: neither the spread of a group's rewards
nor the length of an answer rescales it.

GRPO done right: Liu et al. 2025 (arXiv:2503.20783), section 3.2. Two divisions of GRPO are left out because they bias
the gradient: by the group's standard deviation (advantage = r - mean, which is (G - 1) / G of the unbiased
leave-one-out advantage) and by a completion's length (one constant divides the sum over its tokens, as the generation
limit does in the paper's listing). Process rewards are centred over the steps of the group. Departure: the constant is
a setting, because an algorithm does not know the run's token limit. The KL is off by default, as in the paper's runs.
Reported metrics stay means (over a row's tokens, then over rows).
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from algorithms._advantages import group_centred
from algorithms._group import GroupObjective
from algorithms._losses import row_sum_weights
from harness.types import Batch


class DrGRPO(GroupObjective):
    """GRPO without division by the group's deviation or the answer's length (Dr. GRPO)."""

    objective: ClassVar[Mapping[str, str]] = {
        "advantage": "r - mean in the group",
        **GroupObjective.objective,
        "aggregation": "sum over all tokens / (rows * loss_denominator)",
    }

    name: Literal["dr_grpo"] = "dr_grpo"
    kl_beta: float = Field(0.0, ge=0, description="weight of the KL to the frozen reference, in the loss; 0: none")
    loss_denominator: float = Field(
        default=128.0,
        gt=0,
        description="tokens by which the sum over a completion is divided; the paper: the token limit",
    )

    def normalised(self, rewards_PG: Tensor, mask_PG: Tensor | None = None) -> Tensor:
        return group_centred(rewards_PG, mask_PG)

    def token_weights(self, batch: Batch) -> Tensor:
        return row_sum_weights(batch) / self.loss_denominator
