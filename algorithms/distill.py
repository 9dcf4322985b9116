"""Credit goes to tokens that the teacher finds likelier than the policy does; no reward, no critic.

On-policy distillation: Agarwal et al. 2024 (GKD, arXiv:2306.13649) with samples of the policy alone and the reverse KL,
as a policy gradient (Thinking Machines Lab 2025, "On-Policy Distillation"; Gu et al. 2024, MiniLLM, arXiv:2306.08543):
A_t = log p_teacher(t) - log p_policy(t), the negative one-sample estimate of the KL of this token, which is minimised
as if later tokens did not depend on it (a discount of 0). The teacher is the run's reference, `kl.reference`; rewards
are only measured. Departures: MiniLLM's return over later tokens, its length term and its mixed samples are not built;
PPO's clip bounds updates after the first.
"""

from typing import Literal

from pydantic import Field

from ..harness.base.tensors import kl_k1
from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class Distill(F.ClipSettings):
    """Reverse KL to a teacher on the policy's own samples, token by token (on-policy distillation)."""

    sees_gold = False
    learns_from_rewards = False
    needs_old_logprobs = True
    default_rewards = {"accuracy": 0.0}
    token_mean = True
    objective = {"advantage": "kl_beta * (log p_reference - log p) of each token", "kl": "it is the advantage"}
    name: Literal["distill"] = "distill"
    kl_beta: float = Field(default=1.0, gt=0, description="factor of the advantage; the teacher is kl.reference")

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages_BT=-self.kl_beta * kl_k1(batch.old_logprobs_BT, batch.ref_logprobs_BT))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT, clipped_BT = F.clipped_surrogate(batch, F.token_ratio(batch, policy), *self.clip)
        return F.weighted_loss(batch, policy, loss_BT, clipped_BT)
