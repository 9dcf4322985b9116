"""Pure functions from log-probs to losses: ratios, clipping, aggregation, KL, metrics.

An aggregation mode is the weight of each token in the loss of a minibatch. The learner asks for weights that sum to 1,
so that metrics are means; `Algorithm.loss_weights` is the mean over a row's tokens, then over rows. A mode that does
not sum to 1 (`row_sum_weights`) multiplies those by a fact of the row alone, so that micro-batches still add up.
"""

from typing import Literal

from ..harness.data import Batch, PolicyOutput, Tensor
from ..harness.ground.tensors import kl_k1, kl_k3

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
    mask = batch.completion_mask_BT
    return mask.new_zeros(mask.shape)


def clipped_square(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """[B, T]: the squared error of a value, or of the value clipped to within `clip` of the rollout's if larger."""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return ((values - returns) ** 2).maximum((near - returns) ** 2)


def token_mean_weights(completion_mask_BT: Tensor) -> Tensor:
    """[B, T] loss weights of the mean over all tokens of a minibatch (DAPO, arXiv:2503.14476, eq. 12)."""
    return completion_mask_BT / completion_mask_BT.sum().clamp(min=1)


def row_sum_weights(batch: Batch) -> Tensor:
    """[B, T] loss weights of the sum over a row's tokens, then the mean over rows; `loss_weight_BT` must be the mean
    over both. They sum to the mean completion length, not to 1."""
    assert batch.loss_weight_BT is not None
    return batch.loss_weight_BT * batch.completion_mask_BT.sum(dim=1, keepdim=True)


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2, Schulman 2020: a biased value, but under samples of p its gradient is that of KL(p || q);
    k3 has the gradient of KL(q || p), and k1's is 0 in expectation."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def kl_estimate(estimator: KLEstimator, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Nats per token, by the named estimator."""
    return {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}[estimator](logprobs, ref_logprobs)


def policy_metrics(batch: Batch, policy: PolicyOutput, clipped_BT: Tensor) -> dict[str, Tensor]:
    """The weighted sums that every objective reports: clip fraction, entropy, KL to the sampling policy, and KL to the
    reference if there is one (k3 estimates, nats per token)."""
    assert batch.loss_weight_BT is not None and batch.old_logprobs_BT is not None
    weight, logprobs = batch.loss_weight_BT, policy.logprobs_BT.detach()
    metrics = {
        "policy/clip_fraction": (weight * clipped_BT).sum(),
        "policy/entropy": (weight * policy.entropy_BT.detach()).sum(),
        "kl/old": (weight * kl_k3(logprobs, batch.old_logprobs_BT)).sum(),
    }
    if batch.ref_logprobs_BT is not None:
        metrics["kl/reference"] = (weight * kl_k3(logprobs, batch.ref_logprobs_BT)).sum()
    return metrics
