"""Credit goes to answers that beat the other answers to the same prompt; no critic.

Group Relative Policy Optimization: Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300), eq. 3 (clipped surrogate, mean
over a completion's tokens, then over completions), eq. 4 (k3 KL to the frozen reference, in the loss and not in the
reward), section 4.1.2 (outcome supervision: advantage = reward standardised within its group) and, with rewards of
steps, 4.1.3 (process supervision). Departure, shared by all that call `group_standardised`: the standard deviation uses
G - 1 and a stated floor (the paper gives neither). Settings add other KL estimators, the KL times the ratio
(DeepSeek-V3.2), the KL in the reward (eq. 2, the paper's PPO), a higher upper clip (DAPO), a bound on the ratio of bad
answers (dual clip) and a weight for good answers. Departure of weight 0 from NSR (arXiv:2506.01347): a group that is
all wrong teaches nothing here, where NSR pays each of its answers -1.
"""

from typing import Literal

from pydantic import Field

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class GRPO(F.ClipSettings, F.PlacedKLSettings):
    """Group-standardised verifiable rewards, clipped surrogate, KL in the loss (DeepSeekMath)."""

    min_group_size = 2
    objective = {"advantage": "(r - mean) / (std + 0.0001) in the group; positive: by positive_weight"}
    name: Literal["grpo"] = "grpo"
    kl_beta: float = Field(default=0.04, ge=0, description="weight of the KL to the reference, in the loss; 0: none")
    positive_weight: float = Field(
        default=1.0, ge=0, description="factor of positive advantages; 0: negatives alone (arXiv:2506.01347)"
    )

    def advantages(self, batch: Batch) -> Batch:
        """(r - mean) / (std + 0.0001) in the group, on every token of the answer (sections 4.1.2 and 4.1.3); where it
        is positive, times positive_weight."""
        paid = F.rewards_less_kl(batch, self.kl_beta, self.kl_estimator) if self.kl_in == "reward" else batch
        credit_BT = F.group_advantages(paid, F.group_standardised)
        return batch.replace(advantages_BT=credit_BT.clamp(max=0) + self.positive_weight * credit_BT.clamp(min=0))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        """-min(ratio * A, clip(ratio, 1 - clip_epsilon, 1 + clip_epsilon_high) * A) of each token (eq. 3) plus kl_beta
        times its KL to the reference (eq. 4); the mean over an answer's tokens, then over answers."""
        loss_BT, clipped_BT = F.clipped_surrogate(batch, F.token_ratio(batch, policy), *self.clip)
        if self.kl_in == "loss":
            loss_BT = loss_BT + F.kl_penalty(batch, policy, *self.kl)
        return F.weighted_loss(batch, policy, loss_BT, clipped_BT)
