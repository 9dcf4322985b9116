"""Credit goes to answers that beat their group; a token is masked once its probability has moved too far.

Divergence proximal policy optimization: Qi et al. 2026 (DPPO, arXiv:2602.04879), eq. 12: ratio * A on every token, but
0 where the update would push further (A > 0 and ratio > 1, or A < 0 and ratio < 1) and the divergence from the sampling
policy exceeds a bound. The divergence is between "this token" and "any other": eq. 13, total variation |p - p_old|, or
eq. 14, KL. A rare token may thus grow manyfold, where a clip of the ratio stops it first. From appendix C: bounds 0.15
(TV) and 0.05 (KL), advantage and (by a constant) sum over tokens of Dr. GRPO, no bound on the ratio (`weight_max`; 5 in
the paper's scaling runs, 20 if unset in verl's function, 3 in its actor's settings). verl means over all tokens and
standardises by default. Departures: the old policy is the learner's, not the engine's (they are one with engine
`transformers`); the paper's top-K divergence needs distributions and is left out.
"""

import math
from typing import Literal

from pydantic import Field

from ..harness.data import Batch, PolicyOutput, Tensor
from . import _functional as F

SMALLEST = 1e-8  # added to the probabilities of "any other token", as verl does


class DPPO(F.SumSettings, F.LossKLSettings):
    """Dr. GRPO with a mask by the divergence of a token's probability in place of the clip (DPPO)."""

    min_group_size = 2
    objective = {
        "advantage": "r - mean in the group",
        "clip": "probability of each token, masked where it moved on by a divergence above divergence_bound; "
        "the ratio, a weight without gradient, up to weight_max if set",
    }
    name: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = Field(default="tv", description="of a token's own probability: |p - old|, or KL")
    divergence_bound: float = Field(default=0.15, gt=0, description="largest divergence (kl: nats; the paper has 0.05)")
    weight_max: float | None = Field(default=None, ge=1, description="bound of the ratio as weight; null: no bound")

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages_BT=F.group_advantages(batch, F.group_centred))

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        now, old = policy.logprobs_BT.detach().clamp(max=0), batch.old_logprobs_BT
        distance = (now.exp() - old.exp()).abs() if self.divergence == "tv" else _binary_kl(old, now)
        masked_BT = (distance > self.divergence_bound) & ((now - old) * batch.advantages_BT > 0)
        weight_BT = F.token_ratio(batch, policy).detach().clamp(max=self.weight_max or math.inf)
        carrier_BT = (policy.logprobs_BT - policy.logprobs_BT.detach()).exp()  # 1, with the log-prob's gradient
        loss_BT = -(weight_BT * carrier_BT * batch.advantages_BT).masked_fill(masked_BT, 0.0)
        loss_BT = loss_BT + F.kl_penalty(batch, policy, *self.kl)
        return F.weighted_loss(batch, policy, loss_BT, masked_BT, F.summed_weights(batch, self.loss_denominator))


def _binary_kl(old: Tensor, now: Tensor) -> Tensor:
    others = ((1 - old.exp() + SMALLEST) / (1 - now.exp() + SMALLEST)).log()
    return old.exp() * (old - now) + (1 - old.exp()) * others
