"""Credit goes to answers that beat the other answers to the same prompt; no critic.

Group Relative Policy Optimization: Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300), eq. 3 (clipped surrogate, mean
over a completion's tokens, then over completions), eq. 4 (k3 KL to the frozen reference, in the loss and not in the
reward), section 4.1.2 (outcome supervision: advantage = reward standardised within its group) and, with rewards of
steps, 4.1.3 (process supervision). Departures: the standard deviation uses G - 1 and a stated floor (the paper gives
neither). Settings: other KL estimators, their weight by the ratio (DeepSeek-V3.2), the KL in the reward (eq. 2, PPO's
there), a higher upper clip (DAPO's), a bound on the ratio of bad answers (dual clip), the deviation of the whole batch
(Lite PPO), a weight of good answers, a constant in place of an answer's length (half of Dr. GRPO's change).
"""

from typing import Literal

from pydantic import Field

from ..harness.data import Batch, PolicyOutput, Tensor
from ._advantages import group_advantages, group_standardised
from ._losses import token_ratio
from ._surrogate import Clip, GroupStandardised, PlacedKL


class GRPO(Clip, PlacedKL, GroupStandardised):
    """Group-standardised verifiable rewards, clipped surrogate, KL in the loss (DeepSeekMath)."""

    objective = {
        "advantage": "(r - mean) / (std + std_floor) in the group (of the batch: std_over); positive: by "
        "positive_weight",
        "aggregation": "mean over a row's tokens (their sum / loss_denominator, if set), then over rows",
    }

    name: Literal["grpo"] = "grpo"
    kl_beta: float = Field(default=0.04, ge=0, description="weight of the KL to the reference, in the loss; 0: none")
    std_over: Literal["group", "batch"] = Field(
        default="group", description="standard deviation to divide by: of the group's rewards, or of all"
    )
    positive_weight: float = Field(
        default=1.0, ge=0, description="factor of positive advantages; 0: negatives alone (arXiv:2506.01347)"
    )
    loss_denominator: float | None = Field(
        default=None, gt=0, description="divides the sum over a completion's tokens; null: their number"
    )

    def advantages(self, batch: Batch) -> Batch:
        """(r - mean) / (std + std_floor) in the group, on every token of the answer (sections 4.1.2 and 4.1.3)."""
        of_batch = self.std_over == "batch"
        paid = group_advantages(
            self.paid(batch), lambda r, mask: group_standardised(r, self.std_floor, mask, of_batch=of_batch)
        )
        advantages_BT = paid.advantages_BT
        assert advantages_BT is not None
        weighted_BT = advantages_BT.clamp(max=0) + self.positive_weight * advantages_BT.clamp(min=0)
        return batch.replace(advantages_BT=weighted_BT)

    def token_weights(self, batch: Batch) -> Tensor:
        """[B, T]: a mean over the answer's tokens, or their sum over loss_denominator; then the mean over answers."""
        weight_BT = super().token_weights(batch)
        if self.loss_denominator is None:
            return weight_BT
        return weight_BT * batch.completion_mask_BT.sum(dim=1, keepdim=True) / self.loss_denominator

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        """-min(ratio * A, clip(ratio, 1 - clip_epsilon, 1 + clip_epsilon_high) * A) of each token (eq. 3) plus kl_beta
        times its KL to the reference (eq. 4)."""
        per_token, clipped = self.clipped(token_ratio(batch, policy), batch)
        return self.total(batch, policy, per_token, clipped)
