"""Credit goes to answers that beat their group, as plain REINFORCE: no ratio to an older policy, and no clip.

REINFORCE with group relative advantage: Carrino et al. 2026 (RGRA, arXiv:2603.18756): GRPO's standardised advantage
times the log-prob of each token, mean over a completion's tokens, then over completions, less beta times the KL to the
reference (k3, in the loss), as GRPO has it. On policy its gradient is GRPO's; from the second update of a batch on
nothing corrects for the policy having moved. Departures: as in GRPO. (verl's `gpg`, arXiv:2504.02546, has a mean over
all tokens.)
"""

from typing import Literal

from pydantic import Field

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class RGRA(F.LossKLSettings):
    """REINFORCE on group-standardised rewards, without ratio or clip (RGRA)."""

    min_group_size = 2
    objective = {"advantage": "(r - mean) / (std + 0.0001) in the group"}
    name: Literal["rgra"] = "rgra"
    kl_beta: float = Field(default=0.04, ge=0, description="weight of the KL to the reference, in the loss; 0: none")

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages_BT=F.group_advantages(batch, F.group_standardised))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT = F.reinforced(batch, policy) + F.kl_penalty(batch, policy, *self.kl)
        return F.weighted_loss(batch, policy, loss_BT)
