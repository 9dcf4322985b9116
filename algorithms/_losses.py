"""Pure functions from log-probs to losses: ratios, clipping, aggregation, KL, metrics.

An aggregation mode is the weight of each token in the loss of a minibatch. The learner asks for weights that sum to 1,
so that metrics are means; `Algorithm.loss_weights` is the mean over a row's tokens, then over rows. A mode that does
not sum to 1 (`SummedLoss`) multiplies those by a fact of the row alone, so that micro-batches still add up.
"""

from typing import Literal

from ..harness.base.tensors import kl_k1, kl_k3
from ..harness.data import Batch, PolicyOutput, Tensor

KLEstimator = Literal["k1", "k2", "k3"]


def token_ratio(batch: Batch, policy: PolicyOutput) -> Tensor:
    """[B, T]: each token's probability now over that when it was sampled; 1 outside the completion."""
    assert batch.old_logprobs_BT is not None
    return (policy.logprobs_BT - batch.old_logprobs_BT).exp()


def row_log_ratio(batch: Batch, policy: PolicyOutput) -> Tensor:
    """[B, 1] nats: the sum of a completion's token log-ratios."""
    assert batch.old_logprobs_BT is not None
    return ((policy.logprobs_BT - batch.old_logprobs_BT) * batch.completion_mask_BT).sum(dim=1, keepdim=True)


def clipped_surrogate(
    ratio: Tensor, advantages_BT: Tensor, clip_low: float, clip_high: float | None = None, bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """(per-token loss, whether the clip cuts the token's gradient), both [B, T]; `ratio` is [B, T] or [B, 1].

    PPO, arXiv:1707.06347, eq. 7, negated: -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A); without
    clip_high the clip is symmetric. With a `bound` of 1 + clip_high or more the first ratio counts as the bound where
    it is above, which only matters for A < 0: the dual clip (arXiv:1912.09729) and the two-sided clip
    (INTELLECT-2, arXiv:2505.07291) are this same rule.
    """
    free = ratio * advantages_BT
    clipped = ratio.clamp(1 - clip_low, 1 + (clip_low if clip_high is None else clip_high)) * advantages_BT
    if bound is None:
        return -free.minimum(clipped), clipped < free
    cut = (clipped < free) | ((ratio > bound) & (advantages_BT < 0))
    return -(ratio.clamp(max=bound) * advantages_BT).minimum(clipped), cut


def no_clip(batch: Batch) -> Tensor:
    """[B, T] bool: no token's gradient is cut."""
    return batch.completion_mask_BT.new_zeros(batch.completion_mask_BT.shape)


def kl_estimate(estimator: KLEstimator, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Nats per token, by the named estimator (Schulman 2020).

    k2 is (log p - log q)^2 / 2: a biased value, but under samples of p its gradient is that of KL(p || q); k3 has the
    gradient of KL(q || p), and k1's is 0 in expectation.
    """
    if estimator == "k2":
        return 0.5 * (logprobs - ref_logprobs) ** 2
    return (kl_k1 if estimator == "k1" else kl_k3)(logprobs, ref_logprobs)


def weighted_loss(
    batch: Batch, policy: PolicyOutput, per_token_BT: Tensor, clipped_BT: Tensor, weight_BT: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of a per-token loss, weighted by `weight_BT` (by default `loss_weight_BT`), and what every objective
    reports, as means: clip fraction, entropy, `kl/old` = KL(sampling policy || policy) and, if there is a reference,
    `kl/reference` = KL(policy || reference): k3 estimates, nats per token."""
    assert batch.loss_weight_BT is not None and batch.old_logprobs_BT is not None
    weight, logprobs = batch.loss_weight_BT, policy.logprobs_BT.detach()
    loss = ((weight if weight_BT is None else weight_BT) * per_token_BT).sum()
    metrics = {
        "policy/loss": loss.detach(),
        "policy/clip_fraction": (weight * clipped_BT).sum(),
        "policy/entropy": (weight * policy.entropy_BT.detach()).sum(),
        "kl/old": (weight * kl_k3(batch.old_logprobs_BT, logprobs)).sum(),
    }
    if batch.ref_logprobs_BT is not None:
        metrics["kl/reference"] = (weight * kl_k3(logprobs, batch.ref_logprobs_BT)).sum()
    return loss, metrics
