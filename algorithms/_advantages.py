"""Pure functions from rewards to advantages: within a group, to go, GAE, rewards per token."""

from collections.abc import Callable
from math import inf

from ..harness.base.tensors import kl_k1
from ..harness.data import Batch, Tensor


def counted(rewards_PG: Tensor, mask_PG: Tensor | None) -> Tensor:
    """[P, G] bool: `mask_PG`, or every reward without one."""
    return rewards_PG.new_ones(rewards_PG.shape).bool() if mask_PG is None else mask_PG


def group_centred(rewards_PG: Tensor, mask_PG: Tensor | None = None) -> Tensor:
    """[P, G]: r - mean within each group.

    A group of equal rewards (or of one) gives exact zeros, whatever the rounding of its mean. With `mask_PG` only its
    rewards count, and the rest is 0.
    """
    mask = counted(rewards_PG, mask_PG)
    mean = (rewards_PG * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)  # NaN of none, left out below
    lowest = rewards_PG.masked_fill(~mask, inf).amin(dim=1, keepdim=True)
    highest = rewards_PG.masked_fill(~mask, -inf).amax(dim=1, keepdim=True)
    return (rewards_PG - mean).where(mask & (highest > lowest), 0.0)


def group_standardised(
    rewards_PG: Tensor, std_floor: float, mask_PG: Tensor | None = None, *, of_batch: bool = False
) -> Tensor:
    """[P, G]: (r - mean) / (std + std_floor) within each group, std with count - 1 in the denominator.

    DeepSeekMath, arXiv:2402.03300, section 4.1.2; equal rewards and `mask_PG` as in `group_centred`. With `of_batch`
    the mean is the group's and std that of the rewards of all groups (arXiv:2508.08221).
    """
    centred = group_centred(rewards_PG, mask_PG)
    mask = counted(rewards_PG, mask_PG)
    if of_batch:
        rewards = rewards_PG[mask]
        return centred / (rewards.std() + std_floor) if len(rewards) > 1 else centred
    count = mask.sum(dim=1, keepdim=True)
    std = ((centred**2).sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return centred / (std + std_floor)


def leave_one_out(rewards_PG: Tensor) -> Tensor:
    """[P, G]: each reward minus the mean of the others in its group, which is G / (G - 1) * (r - mean)."""
    size = rewards_PG.shape[1]
    return group_centred(rewards_PG) * (size / (size - 1))


def shrunk_leave_one_out(rewards_PG: Tensor) -> Tensor:
    """[P, G]: each reward minus its baseline, (1 - w) * the mean of the others in its group + w * that of the other
    groups, none of which depends on the reward.

    James-Stein baseline, arXiv:2511.03710, eq. 10 and 13-16: w = (P - 1) / P * v / (v + s). Over the other groups, v is
    the mean of the estimated variance of a group's mean and s the variance of these means (by their number). Without
    noise (v = 0), or other groups, w is 0.
    """
    lead_PG = leave_one_out(rewards_PG)
    num_groups, size = rewards_PG.shape
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


def group_advantages(batch: Batch, normalise: Callable[[Tensor, Tensor | None], Tensor]) -> Batch:
    """The batch whose advantages are the rewards of each group, made comparable by `normalise(rewards_PG, mask_PG)`, on
    every token.

    With rewards of steps a token gets the sum of the normalised rewards that its row still earns (process supervision,
    arXiv:2402.03300, section 4.1.3); an outcome is one more reward, on the last token.
    """
    if batch.step_rewards_BT is None:
        advantages_B1 = normalise(batch.rewards_PG, None).reshape(-1, 1)
        return batch.replace(advantages_BT=advantages_B1 * batch.completion_mask_BT)
    assert batch.step_ends_BT is not None
    shape = (-1, batch.group_size * batch.step_rewards_BT.shape[1])
    normalised = normalise(batch.step_rewards_BT.view(shape), batch.step_ends_BT.view(shape))
    advantages_BT = to_go(normalised.view_as(batch.step_rewards_BT))
    return batch.replace(advantages_BT=advantages_BT * batch.completion_mask_BT)


def to_go(values_BT: Tensor, gamma: float = 1.0) -> Tensor:
    """[B, T]: the sum of a row's values from each token on, each discounted by gamma for every token in between."""
    if gamma == 1:
        return values_BT.flip(1).cumsum(1).flip(1)
    sums = values_BT.clone()
    for t in reversed(range(values_BT.shape[1] - 1)):
        sums[:, t] += gamma * sums[:, t + 1]
    return sums


def generalised_advantages(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, gae_lambda: float | Tensor
) -> Tensor:
    """[B, T] GAE(gamma, lambda) on the tokens in the mask, 0 elsewhere; a row's last token is terminal. Lambda may be
    [B].

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
    reference (k1), if there is one (Ouyang et al. 2022, arXiv:2203.02155)."""
    mask = batch.completion_mask_BT
    rewards_BT = at_last_token(batch.rewards_B, mask) if batch.step_rewards_BT is None else batch.step_rewards_BT
    if batch.ref_logprobs_BT is None:
        return rewards_BT
    assert batch.old_logprobs_BT is not None
    return rewards_BT - kl_beta * kl_k1(batch.old_logprobs_BT, batch.ref_logprobs_BT)
