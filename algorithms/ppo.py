"""Credit goes to tokens that turn out better than a learned critic expected.

Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with GAE (arXiv:1506.02438) as in RLHF
(Ouyang et al. 2022, arXiv:2203.02155): an outcome is paid on the last token and a step at its end; the reward of each
token includes a KL penalty to the frozen reference; advantages are whitened over the batch's tokens; the value loss is
clipped. The critic (own optimiser) is a separate network that starts as the policy or, with `critic: shared`, a head on
the policy's hidden states, whose trunk follows eq. 9: policy loss + value_loss_weight * value loss. Its
targets may have their own lambda (VC-PPO, arXiv:2503.01491), the policy one that grows with the completion (VAPO,
arXiv:2504.05118): an advantage then looks a fixed share of it ahead. Losses are means over all tokens of a minibatch. A
completion cut by the token limit is terminal, like any other. Departures: RLHF's adaptive KL coefficient is a setting
of the run (`kl.schedule: adaptive`); VAPO's lambda is at least 0.
"""

from functools import partial
from typing import Literal

from pydantic import Field

from ..harness.base.tensors import whiten
from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F


class PPO(F.DiscountSettings, F.ClipSettings):
    """Clipped surrogate on GAE advantages from a critic, KL in the reward (RLHF's PPO)."""

    needs_critic = True
    token_mean = True
    objective = {
        "advantage": "GAE(gamma, gae_lambda) from the critic, whitened over the batch's tokens",
        "kl": "kl_beta * k1 to the reference, in the reward of each token",
    }
    name: Literal["ppo"] = "ppo"
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="GAE's lambda; 1: Monte-Carlo returns minus values")
    gae_lambda_critic: float | None = Field(default=None, ge=0, le=1, description="of value targets; null: gae_lambda")
    length_adaptive_alpha: float | None = Field(
        default=None, gt=0, description="alpha of the policy's lambda, 1 - 1 / (alpha * tokens); null: gae_lambda"
    )
    value_clip: float = Field(default=0.2, gt=0, description="how far a value may move from the rollout's")
    critic: Literal["separate", "shared"] = Field(default="separate", description="own network, or head on the policy")
    value_loss_weight: float = Field(default=1.0, gt=0, description="weight of half the squared error if shared")

    @property
    def shares_trunk(self) -> bool:
        return self.critic == "shared"

    def advantages(self, batch: Batch) -> Batch:
        mask, values = batch.completion_mask_BT, batch.values_BT
        gae = partial(F.generalised_advantages, F.token_rewards(batch, self.kl_beta), values, mask, self.gamma)
        own, alpha = self.gae_lambda_critic, self.length_adaptive_alpha
        targets = gae(self.gae_lambda if own is None else own)
        returns, advantages = targets + values, targets
        if alpha is not None:
            advantages = gae((1 - 1 / (alpha * mask.sum(dim=1))).clamp(min=0))
        elif own is not None:
            advantages = gae(self.gae_lambda)
        return batch.replace(advantages_BT=whiten(advantages, mask), returns_BT=returns)

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        weight, returns, values, old_values = batch.loss_weight_BT, batch.returns_BT, policy.values_BT, batch.values_BT
        loss_BT, clipped_BT = F.clipped_surrogate(batch, F.token_ratio(batch, policy), *self.clip)
        policy_loss, metrics = F.weighted_loss(batch, policy, loss_BT, clipped_BT)
        near = old_values + (values - old_values).clamp(-self.value_clip, self.value_clip)
        critic_loss = 0.5 * (weight * ((values - returns) ** 2).maximum((near - returns) ** 2)).sum()
        return policy_loss + self.value_loss_weight * critic_loss, {**metrics, "critic/loss": critic_loss.detach()}
