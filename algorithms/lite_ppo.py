"""Credit goes to answers that beat their group, on one scale for the whole batch and equally to every token.

Lite PPO: Liu et al. 2025 ("Tricks or Traps?", arXiv:2508.08221): of all tricks only two, on PPO's clipped loss without
a critic: rewards less the mean of their group, divided by the standard deviation of the batch's rewards, and the mean
over all tokens. So a group with one odd answer out is not scaled up, as the group's own small deviation would do. It is
`grpo` with `std_over: batch`, without KL, in DAPO's aggregation. Departures: the standard deviation has n - 1 and
GRPO's floor, as TRL's `scale_rewards="batch"`; the mean is over the tokens of a minibatch. Process rewards are as in
GRPO.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from ..harness.data import Tensor
from ._losses import token_mean_weights
from .grpo import GRPO


class LitePPO(GRPO):
    """GRPO with the group's mean, the batch's deviation and a mean over all tokens (Lite PPO)."""

    objective: ClassVar[Mapping[str, str]] = {
        **GRPO.objective,
        "advantage": "(r - mean in the group) / (std + std_floor) of the batch (of the group: std_over)",
        "aggregation": "mean over all tokens",
    }

    name: Literal["lite_ppo"] = "lite_ppo"
    kl_beta: float = Field(0.0, ge=0, description="weight of the KL to the frozen reference, in the loss; 0: none")
    std_over: Literal["group", "batch"] = Field(
        default="batch",
        description="standard deviation to divide by: of the group's rewards, or of all groups' rewards",
    )

    def loss_weights(self, completion_mask_BT: Tensor) -> Tensor:
        return token_mean_weights(completion_mask_BT)
