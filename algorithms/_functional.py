"""The parts of objectives: pure functions for advantages, ratios, clips, KL and sums over tokens, and the settings
that several algorithms have, each declared once.

An aggregation mode is the weight of each token in the loss of a minibatch. The learner asks for weights that sum to 1,
so that metrics are means; `Algorithm.loss_weights` takes the mean over a row's tokens, then over rows. A mode that does
not sum to 1 (`summed_weights`) multiplies them by a factor of the row alone, so that micro-batches still add up.
"""

from collections.abc import Callable
from math import inf
from typing import Literal, Self

from pydantic import Field, model_validator

from ..harness.base.tensors import kl_k1, kl_k3
from ..harness.data import UNSET, Batch, PolicyOutput, Tensor
from ..harness.interfaces import Algorithm

STD_FLOOR = 1e-4  # added to a standard deviation in a denominator, as TRL does; verl adds 1e-6
KLEstimator = Literal["k1", "k2", "k3"]

# Settings, with their words for `objective`. The file of each algorithm shows their effect.


class ClipSettings(Algorithm):
    """Bounds of a ratio; the algorithm decides whether a token or a completion has one."""

    objective = {"clip": "ratio of each token, 1 - clip_epsilon to 1 + clip_epsilon_high, at most ratio_bound"}
    clip_epsilon: float = Field(
        default=0.2, gt=0, lt=1, description="how far the ratio may fall below 1; binds from the 2nd update of a batch"
    )
    clip_epsilon_high: float | None = Field(default=None, gt=0, description="ratio's rise above 1; null: clip_epsilon")
    ratio_bound: float | None = Field(
        default=None, gt=1, description="bound of the ratio for negative advantages (dual clip); null: none"
    )

    @property
    def clip(self) -> tuple[float, float, float | None]:
        """The lowest and the highest ratio within the clip, and the bound."""
        rise = self.clip_epsilon if self.clip_epsilon_high is None else self.clip_epsilon_high
        return 1 - self.clip_epsilon, 1 + rise, self.ratio_bound

    @model_validator(mode="after")
    def _the_bound_lies_beyond_the_clip(self) -> Self:
        _, highest, bound = self.clip
        if bound is not None and bound < highest:
            raise ValueError(
                f"algorithm.ratio_bound must be at least the upper clip, {highest:g}, got {bound:g}; raise it or lower "
                "algorithm.clip_epsilon_high"
            )
        return self


class RowClipSettings(ClipSettings):
    """Bounds of the geometric mean of a completion's ratios, which moves far less than the ratio of a token."""

    objective = {
        "clip": "ratio of each row (geometric mean of its tokens'), 1 - clip_epsilon to 1 + clip_epsilon_high, at most "
        "ratio_bound"
    }
    clip_epsilon: float = Field(default=3e-4, gt=0, lt=1, description="how far a completion's ratio may fall below 1")
    clip_epsilon_high: float | None = Field(default=4e-4, gt=0, description="ratio's rise above 1; null: clip_epsilon")


class RewardKLSettings(Algorithm):
    """A KL penalty in the reward, before advantages (Ouyang et al. 2022, arXiv:2203.02155)."""

    kl_beta: float = Field(default=0.01, ge=0, description="weight of the KL to the reference, in the reward; 0: none")

    @property
    def needs_old_logprobs(self) -> bool:
        return self.kl_beta > 0


class DiscountSettings(RewardKLSettings):
    """The same where each token is paid by the rewards from there on."""

    gamma: float = Field(default=1.0, ge=0, le=1, description="discount per token of the rewards to come")


class LossKLSettings(Algorithm):
    """A KL penalty in the loss, beside the per-token loss of the algorithm (arXiv:2402.03300, eq. 3-4)."""

    objective = {
        "kl": "kl_beta * kl_estimator to the reference, in the loss (times the token's ratio: kl_importance_weighted)"
    }
    kl_estimator: KLEstimator = Field(
        default="k3",
        description="per-token KL estimator; k2 has the gradient of KL(policy, reference), k3 of KL(reference, "
        "policy), k1 none in expectation",
    )
    kl_importance_weighted: bool = Field(
        default=False,
        description="multiply the estimate by the token's ratio, with its gradient (DeepSeek-V3.2, arXiv:2512.02556): "
        "k1 and k3 then have the gradient of KL(policy, reference), off policy too",
    )

    @property
    def kl(self) -> tuple[float, KLEstimator, bool]:
        return self.kl_beta, self.kl_estimator, self.kl_importance_weighted


class PlacedKLSettings(LossKLSettings):
    """A KL penalty in the loss, or in the reward of each completion (`rewards_less_kl`)."""

    objective = {"kl": f"{LossKLSettings.objective['kl']}; or its sum over a row, before the group is compared (kl_in)"}
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="place of the KL; in the reward k1 has the gradient of KL(policy, reference)"
    )

    @model_validator(mode="after")
    def _a_reward_has_no_ratio(self) -> Self:
        if self.kl_in == "reward" and self.kl_importance_weighted:
            raise ValueError(
                "algorithm.kl_importance_weighted must be false with algorithm.kl_in=reward, where the ratio is 1, got "
                "true; leave it out"
            )
        return self

    @property
    def needs_old_logprobs(self) -> bool:
        return self.kl_in == "reward" and self.kl_beta > 0


class SumSettings(Algorithm):
    """The sum over a completion's tokens, divided by a constant (`summed_weights`)."""

    objective = {"aggregation": "sum over all tokens / (rows * loss_denominator)"}
    loss_denominator: float = Field(
        default=128.0, gt=0, description="divides the sum over a completion's tokens; in the paper the token limit"
    )


# From rewards to advantages.


def rewards_less_kl(batch: Batch, kl_beta: float, estimator: KLEstimator) -> Batch:
    """The batch with rewards less kl_beta times the KL to the reference, if there is one: the sum over a completion's
    tokens, at the sampling policy, before the group is compared.

    In the reward k1 alone has the gradient of KL(policy, reference), with its part through later tokens
    (arXiv:2512.21852). With rewards of steps it is paid at the last token.
    """
    if batch.ref_logprobs_BT is None:
        return batch
    divergence_BT = kl_estimate(estimator, batch.old_logprobs_BT, batch.ref_logprobs_BT)
    cost_B, mask = kl_beta * divergence_BT.sum(dim=1), batch.completion_mask_BT
    batch = batch.replace(rewards_B=batch.rewards_B - cost_B)
    if batch.step_rewards_BT is None:
        return batch
    ends_BT = batch.step_ends_BT | (at_last_token(cost_B.new_ones(len(cost_B)), mask) > 0)
    steps_BT = batch.step_rewards_BT - at_last_token(cost_B, mask)
    return batch.replace(step_rewards_BT=steps_BT, step_ends_BT=ends_BT)


def counted(rewards_PG: Tensor, mask_PG: Tensor | None) -> Tensor:
    """[P, G] bool: `mask_PG`, or all True without one."""
    return rewards_PG.new_ones(rewards_PG.shape).bool() if mask_PG is None else mask_PG


def group_centred(rewards_PG: Tensor, mask_PG: Tensor | None = None) -> Tensor:
    """[P, G]: r - mean within each group, over the rewards in `mask_PG` if given, and 0 for the rest.

    A group of equal rewards (or of one) gives exact zeros, whatever the rounding of its mean.
    """
    mask = counted(rewards_PG, mask_PG)
    mean = (rewards_PG * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)  # NaN of none, left out below
    lowest = rewards_PG.masked_fill(~mask, inf).amin(dim=1, keepdim=True)
    highest = rewards_PG.masked_fill(~mask, -inf).amax(dim=1, keepdim=True)
    return (rewards_PG - mean).where(mask & (highest > lowest), 0.0)


def group_standardised(rewards_PG: Tensor, mask_PG: Tensor | None = None, *, of_batch: bool = False) -> Tensor:
    """[P, G]: (r - mean) / (std + STD_FLOOR) within each group, std with count - 1 in the denominator.

    DeepSeekMath, arXiv:2402.03300, section 4.1.2; equal rewards and `mask_PG` as in `group_centred`. With `of_batch`
    std is over the rewards of all groups (arXiv:2508.08221).
    """
    centred, mask = group_centred(rewards_PG, mask_PG), counted(rewards_PG, mask_PG)
    if of_batch:
        rewards = rewards_PG[mask]
        return centred / (rewards.std() + STD_FLOOR) if len(rewards) > 1 else centred
    count = mask.sum(dim=1, keepdim=True)
    std = ((centred**2).sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return centred / (std + STD_FLOOR)


def leave_one_out(rewards_PG: Tensor) -> Tensor:
    """[P, G]: each reward minus the mean of the others in its group, which is G / (G - 1) * (r - mean)."""
    size = rewards_PG.shape[1]
    return group_centred(rewards_PG) * (size / (size - 1))


def shrunk_leave_one_out(rewards_PG: Tensor) -> Tensor:
    """[P, G]: each reward minus (1 - w) * the mean of the others in its group + w * the mean of the other groups; w and
    the means do not depend on the reward.

    James-Stein baseline, arXiv:2511.03710, eq. 10 and 13-16: w = (P - 1) / P * v / (v + s). Over the other groups, v is
    the mean of the estimated variance of a group's mean and s the variance of these means (by their number). Without
    noise (v = 0), or other groups, w is 0.
    """
    lead_PG, (num_groups, size) = leave_one_out(rewards_PG), rewards_PG.shape
    if num_groups == 1:
        return lead_PG
    mean_1P = rewards_PG.mean(dim=1)[None]
    noise_P = (group_centred(rewards_PG) ** 2).sum(dim=1) / (size * (size - 1))
    share_PP = (1 - mean_1P.new_ones(num_groups).diag()) / (num_groups - 1)  # row p: of each other group
    target_P1 = (share_PP * mean_1P).sum(dim=1, keepdim=True)
    spread_P = (share_PP * (mean_1P - target_P1) ** 2).sum(dim=1)
    noise_P = share_PP @ noise_P
    weight_P = (num_groups - 1) / num_groups * (noise_P / (noise_P + spread_P)).where(noise_P > 0, 0.0)
    return lead_PG + weight_P[:, None] * (rewards_PG - lead_PG - target_P1)


def group_advantages(batch: Batch, normalise: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
    """[B, T]: the rewards of each group, made comparable by `normalise(rewards_PG, mask_PG)`, on every token.

    With rewards of steps a token gets the sum of the normalised rewards that its row still earns (process supervision,
    arXiv:2402.03300, section 4.1.3); an outcome is one more reward, on the last token.
    """
    if batch.step_rewards_BT is None:
        return normalise(batch.rewards_PG, None).reshape(-1, 1) * batch.completion_mask_BT
    shape = (-1, batch.group_size * batch.step_rewards_BT.shape[1])
    normalised = normalise(batch.step_rewards_BT.view(shape), batch.step_ends_BT.view(shape))
    return to_go(normalised.view_as(batch.step_rewards_BT)) * batch.completion_mask_BT


def to_go(values_BT: Tensor, gamma: float = 1.0) -> Tensor:
    """[B, T]: the sum of a row's values from each token on, discounted by gamma for every token in between."""
    if gamma == 1:
        return values_BT.flip(1).cumsum(1).flip(1)
    sums = values_BT.clone()
    for t in reversed(range(values_BT.shape[1] - 1)):
        sums[:, t] += gamma * sums[:, t + 1]
    return sums


def generalised_advantages(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, gae_lambda: float | Tensor
) -> Tensor:
    """[B, T] GAE(gamma, lambda) on the tokens in the mask, 0 elsewhere. The last token before a hole of the mask is
    terminal, as a row's last one is, so nothing flows over a hole. Lambda may be [B].

    arXiv:1506.02438, eq. 16: delta_t = r_t + gamma * V_{t+1} - V_t, A_t = delta_t + gamma * lambda * A_{t+1}.
    """
    advantages = rewards_BT.new_zeros(rewards_BT.shape)
    running = next_value = rewards_BT.new_zeros(len(rewards_BT))
    for t in reversed(range(rewards_BT.shape[1])):
        mask = mask_BT[:, t]
        delta = rewards_BT[:, t] + gamma * next_value - values_BT[:, t]
        running = (delta + gamma * gae_lambda * running).where(mask, 0.0)
        next_value = values_BT[:, t].where(mask, 0.0)
        advantages[:, t] = running
    return advantages


def at_last_token(rewards_B: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T]: each row's reward on its last token in the mask, 0 elsewhere."""
    return rewards_B[:, None].where(mask_BT & (to_go(mask_BT) == 1), 0.0)


def token_rewards(batch: Batch, kl_beta: float) -> Tensor:
    """[B, T]: an outcome on the last token, a step's reward at its end, minus kl_beta times each token's KL to the
    reference (k1), if there is one (arXiv:2203.02155)."""
    mask = batch.completion_mask_BT
    rewards_BT = at_last_token(batch.rewards_B, mask) if batch.step_rewards_BT is None else batch.step_rewards_BT
    if batch.ref_logprobs_BT is None:
        return rewards_BT
    return rewards_BT - kl_beta * kl_k1(batch.old_logprobs_BT, batch.ref_logprobs_BT)


# From log-probs to losses.


def token_ratio(batch: Batch, policy: PolicyOutput) -> Tensor:
    """[B, T]: each token's probability now over its probability when sampled; 1 outside the completion."""
    return (policy.logprobs_BT - batch.old_logprobs_BT).exp()


def row_log_ratio(batch: Batch, policy: PolicyOutput) -> Tensor:
    """[B, 1] nats: the sum of a completion's token log-ratios."""
    return ((policy.logprobs_BT - batch.old_logprobs_BT) * batch.completion_mask_BT).sum(dim=1, keepdim=True)


def mean_row_ratio(batch: Batch, policy: PolicyOutput) -> Tensor:
    """[B, T]: the geometric mean of a row's token ratios, with the gradient of each token's own log-prob (GSPO-token,
    arXiv:2507.18071, section 4.3)."""
    num_tokens_B1 = batch.completion_mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    row_ratio_B1 = (row_log_ratio(batch, policy).detach() / num_tokens_B1).exp()
    return row_ratio_B1 * (policy.logprobs_BT - policy.logprobs_BT.detach()).exp()


def clipped_surrogate(
    batch: Batch, ratio: Tensor, lowest: float, highest: float, bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """(per-token loss, whether the clip cuts the token's gradient), both [B, T]; `ratio` is [B, T] or [B, 1].

    PPO, arXiv:1707.06347, eq. 7, negated: -min(ratio * A, clip(ratio, lowest, highest) * A). With a `bound` no lower
    than the clip the first ratio counts as the bound where it is above, which only matters for A < 0: the dual clip
    (arXiv:1912.09729) and the two-sided clip (INTELLECT-2, arXiv:2505.07291) are this same rule.
    """
    advantages_BT, bound = batch.advantages_BT, inf if bound is None else bound
    free, clipped = ratio * advantages_BT, ratio.clamp(lowest, highest) * advantages_BT
    cut = (clipped < free) | ((ratio > bound) & (advantages_BT < 0))
    return -(ratio.clamp(max=bound) * advantages_BT).minimum(clipped), cut


def reinforced(batch: Batch, policy: PolicyOutput, weight: Tensor | float = 1.0) -> Tensor:
    """[B, T]: REINFORCE's loss of each token, -weight * A * log p; only the log-prob has a gradient."""
    return -weight * batch.advantages_BT * policy.logprobs_BT


def kl_estimate(estimator: KLEstimator, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Nats per token, by the named estimator (Schulman 2020).

    k2 is (log p - log q)^2 / 2: a biased value, but under samples of p it has the gradient of KL(p || q); k3 has the
    gradient of KL(q || p), and k1's is 0 in expectation.
    """
    if estimator == "k2":
        return 0.5 * (logprobs - ref_logprobs) ** 2
    return (kl_k1 if estimator == "k1" else kl_k3)(logprobs, ref_logprobs)


def kl_penalty(
    batch: Batch, policy: PolicyOutput, kl_beta: float, estimator: KLEstimator, importance_weighted: bool = False
) -> Tensor | float:
    """[B, T]: kl_beta times each token's KL to the reference (times its ratio, if so weighted); 0 without reference."""
    if batch.ref_logprobs_BT is None:
        return 0.0
    divergence = kl_estimate(estimator, policy.logprobs_BT, batch.ref_logprobs_BT)
    return kl_beta * (token_ratio(batch, policy) * divergence if importance_weighted else divergence)


def summed_weights(batch: Batch, loss_denominator: float) -> Tensor:
    """[B, T]: weights of a row's mean made weights of its sum over a constant, so that no answer's length rescales its
    gradient."""
    return batch.loss_weight_BT * batch.completion_mask_BT.sum(dim=1, keepdim=True) / loss_denominator


def weighted_loss(
    batch: Batch, policy: PolicyOutput, loss_BT: Tensor, clipped_BT: Tensor | None = None, weight_BT: Tensor = UNSET
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of a per-token loss, weighted by `weight_BT` (by default `loss_weight_BT`), and what every objective
    reports, as means: share of clipped tokens (None: none is), entropy, `kl/old` = KL(sampling policy || policy) and,
    if there is a reference, `kl/reference` = KL(policy || reference): k3 estimates, nats per token."""
    weight, logprobs = batch.loss_weight_BT, policy.logprobs_BT.detach()
    loss = ((weight if weight_BT is None else weight_BT) * loss_BT).sum()
    metrics = {
        "policy/loss": loss.detach(),
        "policy/clip_fraction": weight.new_zeros(()) if clipped_BT is None else (weight * clipped_BT).sum(),
        "policy/entropy": (weight * policy.entropy_BT.detach()).sum(),
        "kl/old": (weight * kl_k3(batch.old_logprobs_BT, logprobs)).sum(),
    }
    if batch.ref_logprobs_BT is not None:
        metrics["kl/reference"] = (weight * kl_k3(logprobs, batch.ref_logprobs_BT)).sum()
    return loss, metrics
