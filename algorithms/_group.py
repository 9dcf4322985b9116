"""Settings and objectives of algorithms that compare each answer with the other answers to the same prompt."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from ..harness.data import Batch, Tensor
from ._advantages import group_advantages, group_standardised
from ._surrogate import SurrogateLoss


class GroupStandardised(SurrogateLoss):
    """The group's rewards are standardised (arXiv:2402.03300, section 4.1.2)."""

    min_group_size: ClassVar[int] = 2
    objective: ClassVar[Mapping[str, str]] = {
        "advantage": "(r - mean) / (std + std_floor) in the group (std of the batch: std_over)",
        **SurrogateLoss.objective,
    }

    std_floor: float = Field(
        default=1e-4, gt=0, description="constant added to the standard deviation in the denominator"
    )
    std_over: Literal["group", "batch"] = Field(
        default="group",
        description="standard deviation to divide by: of the group's rewards, or of all groups' rewards",
    )

    def normalised(self, rewards_PG: Tensor, mask_PG: Tensor | None = None) -> Tensor:
        """[P, G]: the rewards, made comparable within each group; only those in the mask count, the rest is 0."""
        return group_standardised(rewards_PG, self.std_floor, mask_PG, of_batch=self.std_over == "batch")

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages_BT=group_advantages(batch, self.normalised))
