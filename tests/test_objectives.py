"""The numbers of every objective, against hand arithmetic and float64 references written out here."""

import math

import numpy as np
import pytest
import torch
from cohort.algorithms._advantages import (
    at_last_token,
    generalised_advantages,
    group_centred,
    group_standardised,
    leave_one_out,
)
from cohort.algorithms._losses import clipped_surrogate, kl_estimate, row_sum_weights, token_mean_weights
from cohort.algorithms.grpo import GRPO
from cohort.algorithms.ppo import PPO
from cohort.harness.data import Batch, PolicyOutput
from cohort.harness.ground.tensors import kl_k1, kl_k3, whiten


def batch_of(mask, rewards, group_size, **tensors):
    mask = torch.tensor(mask, dtype=torch.bool)
    return Batch(
        tokens_BT=torch.zeros(mask.shape, dtype=torch.int64),
        completion_mask_BT=mask,
        lengths_B=torch.full((len(mask),), mask.shape[1]),
        sampler_logprobs_BT=torch.zeros(mask.shape),
        rewards_B=torch.tensor(rewards),
        group_size=group_size,
        **tensors,
    )


def test_group_advantages_equal_the_hand_computed_standard_scores():
    # rewards 1 0 0 1: mean 1/2, sample variance 4 * 0.25 / 3 = 1/3, so +-0.5 / sqrt(1/3) = +-0.8660254
    scores = group_standardised(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), std_floor=1e-12)
    assert scores.tolist()[0] == pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254], abs=1e-6)


def test_std_floor_shrinks_the_scores_by_the_stated_amount():
    # +-0.5 / (0.57735027 + 0.1) = 0.7381706
    scores = group_standardised(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), std_floor=0.1)
    assert scores[0, 0].item() == pytest.approx(0.5 / 0.67735027, abs=1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 1e-3, 1e8])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_equal_rewards_give_exact_zeros(value, size):
    assert torch.equal(group_standardised(torch.full((3, size), value), 1e-4), torch.zeros(3, size))


def test_reward_pairs_with_another_scale_give_the_same_advantages():
    pattern = torch.tensor([[1.0, 0, 0, 1, 0, 0, 0, 0]])
    plain = group_standardised(pattern, 1e-9)
    signed = group_standardised(pattern * 1.1 - 0.1, 1e-9)  # 1 / -0.1 instead of 1 / 0
    assert torch.allclose(plain, signed, atol=1e-5)


def test_clipping_takes_the_pessimistic_side():
    # ratio 1.5: A > 0 is cut at 1.2, A < 0 is not; ratio 0.5: A > 0 is not cut, A < 0 is cut at 0.8
    ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 2.0]])
    loss, clipped = clipped_surrogate(ratio, advantages, 0.2)
    assert loss[0].tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8, -2.2], abs=1e-6)
    assert clipped[0].tolist() == [True, False, False, True, False]


def test_clipped_tokens_carry_no_gradient():
    logprobs = torch.log(torch.tensor([[1.5, 1.1]])).requires_grad_()
    clipped_surrogate(logprobs.exp(), torch.ones(1, 2), 0.2)[0].sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, -1.1], abs=1e-6)


def test_the_upper_clip_may_lie_further_away_than_the_lower():
    # low 0.2, high 0.28: A > 0 is cut at 1.28, A < 0 at 0.8; 1.25 lies inside
    ratio = torch.tensor([[1.5, 1.25, 0.5, 0.5]])
    loss, clipped = clipped_surrogate(ratio, torch.tensor([[1.0, 1.0, 1.0, -1.0]]), 0.2, 0.28)
    assert loss[0].tolist() == pytest.approx([-1.28, -1.25, -0.5, 0.8], abs=1e-6)
    assert clipped[0].tolist() == [True, False, False, True]


def test_one_ratio_per_row_is_clipped_for_all_its_tokens():
    loss, clipped = clipped_surrogate(torch.tensor([[1.5]]), torch.tensor([[1.0, -1.0, 0.0]]), 0.2)
    assert loss[0].tolist() == pytest.approx([-1.2, 1.5, 0.0], abs=1e-6)
    assert clipped[0].tolist() == [True, False, False]


def test_an_infinite_clip_is_none():
    loss, clipped = clipped_surrogate(torch.tensor([[100.0, 0.01]]), torch.ones(1, 2), math.inf)
    assert loss[0].tolist() == pytest.approx([-100, -0.01])
    assert not clipped.any()


def test_rewards_are_centred_on_the_mean_of_the_group_or_of_the_others():
    # 3 0 0 1: mean 1; the others of the first have mean 1/3, of the second 4/3, of the last 1
    rewards = torch.tensor([[3.0, 0.0, 0.0, 1.0]])
    assert group_centred(rewards)[0].tolist() == pytest.approx([2, -1, -1, 0], abs=1e-6)
    assert leave_one_out(rewards)[0].tolist() == pytest.approx([8 / 3, -4 / 3, -4 / 3, 0], abs=1e-6)


def test_only_masked_rewards_are_centred():
    centred = group_centred(torch.tensor([[1.0, 99.0, 3.0]]), torch.tensor([[True, False, True]]))
    assert centred[0].tolist() == [-1, 0, 1]


@pytest.mark.parametrize("function", [group_centred, leave_one_out])
def test_equal_rewards_are_centred_to_exact_zeros(function):
    assert torch.equal(function(torch.full((2, 7), 0.1)), torch.zeros(2, 7))


def test_aggregation_modes_weigh_tokens_as_they_say():
    # rows of 3 and 1 tokens: row mean 1/6 and 1/2, token mean 1/4, row sum 1/2 each
    batch = batch_of([[0, 1, 1, 1], [0, 1, 0, 0]], [0.0, 0.0], 2)
    mask = batch.completion_mask_BT
    row_mean = GRPO().loss_weights(mask)
    assert row_mean.tolist() == [pytest.approx([0, 1 / 6, 1 / 6, 1 / 6]), pytest.approx([0, 1 / 2, 0, 0])]
    assert token_mean_weights(mask).tolist() == [[0, 0.25, 0.25, 0.25], [0, 0.25, 0, 0]]
    sums = row_sum_weights(batch.replace(loss_weight_BT=row_mean))
    assert sums.tolist() == [pytest.approx([0, 0.5, 0.5, 0.5]), pytest.approx([0, 0.5, 0, 0])]


@pytest.mark.parametrize("weights", [token_mean_weights, GRPO().loss_weights])
def test_a_minibatch_without_tokens_has_no_weight(weights):
    assert torch.equal(weights(torch.zeros(2, 3, dtype=torch.bool)), torch.zeros(2, 3))


def test_kl_estimators_equal_their_formulas():
    # log p = log 0.5, log q = log 0.25: k1 = log 2, k2 = (log 2)^2 / 2, k3 = 0.5 - 1 + log 2
    p, q = torch.log(torch.tensor(0.5)), torch.log(torch.tensor(0.25))
    assert kl_k1(p, q).item() == pytest.approx(math.log(2), abs=1e-6)
    assert kl_k3(p, q).item() == pytest.approx(math.log(2) - 0.5, abs=1e-6)
    values = [kl_estimate(name, p, q).item() for name in ("k1", "k2", "k3")]
    assert values == pytest.approx([math.log(2), math.log(2) ** 2 / 2, math.log(2) - 0.5], abs=1e-6)


def test_expected_k3_is_the_true_divergence():
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    truth = (p * (p / q).log()).sum()
    assert (p * kl_k3(p.log(), q.log())).sum().item() == pytest.approx(truth.item(), abs=1e-12)


def test_whitened_values_have_mean_zero_and_variance_one_inside_the_mask_only():
    mask = torch.tensor([[True, True, True, False]])
    white = whiten(torch.tensor([[1.0, 2.0, 3.0, 99.0]]), mask)
    # variance of 1 2 3 is 2/3, so +-1 / sqrt(2/3) = 1.2247449
    assert white[0].tolist() == pytest.approx([-1.2247449, 0, 1.2247449, 0], abs=1e-5)


def reference_gae(rewards, values, gamma, lam):
    """The defining sum, in float64: A_t = sum_l (gamma * lambda)^l * delta_{t+l}."""
    n = len(rewards)
    following = np.append(values[1:], 0.0)
    deltas = rewards + gamma * following - values
    return np.array([sum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (0.0, 1.0)])
def test_gae_equals_the_defining_sum_for_rows_of_every_length(gamma, lam):
    random = np.random.default_rng(0)
    width = 7
    for start, length in [(1, 6), (3, 1), (2, 4), (6, 1)]:
        rewards, values = random.normal(size=length), random.normal(size=length)
        full = {k: torch.zeros(1, width, dtype=torch.float64) for k in ("r", "v")}
        mask = torch.zeros(1, width, dtype=torch.bool)
        mask[0, start : start + length] = True
        full["r"][mask], full["v"][mask] = torch.tensor(rewards), torch.tensor(values)
        result = generalised_advantages(full["r"], full["v"], mask, gamma, lam)
        assert result[mask].numpy() == pytest.approx(reference_gae(rewards, values, gamma, lam), abs=1e-12)
        assert result[~mask].abs().sum() == 0


def test_gae_of_an_empty_row_is_zero():
    empty = torch.zeros(1, 3, dtype=torch.bool)
    assert torch.equal(generalised_advantages(torch.ones(1, 3), torch.ones(1, 3), empty, 1, 1), torch.zeros(1, 3))


def test_the_reward_stands_on_the_last_completion_token():
    mask = torch.tensor([[False, True, True, False], [False, True, True, True]])
    assert at_last_token(torch.tensor([2.0, 3.0]), mask).tolist() == [[0, 0, 2, 0], [0, 0, 0, 3]]


def test_grpo_loss_is_the_mean_over_tokens_then_over_completions():
    # on-policy (ratio 1), no KL: row means are -A_i, so the loss is -(0.5 - 2) / 2 = 0.75 whatever the lengths
    batch = batch_of([[0, 1, 1, 1], [0, 1, 0, 0]], [0.0, 0.0], 2, old_logprobs_BT=torch.zeros(2, 4))
    algorithm = GRPO(kl_beta=0.0)
    batch = batch.replace(
        advantages_BT=torch.tensor([[0.5], [-2.0]]) * batch.completion_mask_BT,
        loss_weight_BT=algorithm.loss_weights(batch.completion_mask_BT),
    )
    loss, metrics = algorithm.loss(batch, PolicyOutput(torch.zeros(2, 4), torch.zeros(2, 4)))
    assert loss.item() == pytest.approx(0.75, abs=1e-6)
    assert metrics["policy/clip_fraction"].item() == 0


def test_grpo_adds_beta_times_the_k3_divergence():
    mask = [[0, 1, 1]]
    algorithm = GRPO(kl_beta=0.5)
    batch = batch_of(
        mask, [0.0], 1, old_logprobs_BT=torch.zeros(1, 3), ref_logprobs_BT=torch.tensor([[0, -0.5, -0.25]])
    )
    batch = batch.replace(
        advantages_BT=torch.zeros(1, 3), loss_weight_BT=algorithm.loss_weights(batch.completion_mask_BT)
    )
    k3 = [math.exp(d) - 1 - d for d in (-0.5, -0.25)]
    loss, metrics = algorithm.loss(batch, PolicyOutput(torch.zeros(1, 3), torch.zeros(1, 3)))
    assert loss.item() == pytest.approx(0.5 * sum(k3) / 2, abs=1e-6)
    assert metrics["kl/reference"].item() == pytest.approx(sum(k3) / 2, abs=1e-6)


def test_ppo_returns_and_whitened_advantages_follow_from_reward_minus_kl():
    # one row of two tokens, lambda = gamma = 1, values 0.5 and 0.25, terminal reward 1, beta 0.1,
    # log-ratios to the reference 0.2 and -0.1: rewards -0.02 and 1 + 0.01; returns 0.99 and 1.01;
    # advantages 0.49 and 0.76, whitened to -1 and +1
    batch = batch_of(
        [[0, 1, 1]],
        [1.0],
        1,
        values_BT=torch.tensor([[0, 0.5, 0.25]]),
        old_logprobs_BT=torch.tensor([[0, -1.0, -1.0]]),
        ref_logprobs_BT=torch.tensor([[0, -1.2, -0.9]]),
    )
    result = PPO(kl_beta=0.1).advantages(batch)
    assert result.returns_BT is not None and result.advantages_BT is not None
    assert result.returns_BT[0].tolist() == pytest.approx([0, 0.99, 1.01], abs=1e-6)
    assert result.advantages_BT[0].tolist() == pytest.approx([0, -1, 1], abs=1e-5)


def test_ppo_value_loss_is_clipped_and_entropy_is_rewarded():
    # value 1.0, old 0.5, clip 0.2 -> near 0.7; return 0: max(1.0, 0.49) / 2 = 0.5. Policy: -A = -1, minus 0.1 * 2 nats
    batch = batch_of([[0, 1]], [0.0], 1, old_logprobs_BT=torch.zeros(1, 2), values_BT=torch.tensor([[0, 0.5]]))
    algorithm = PPO(entropy_bonus=0.1, value_clip=0.2)
    batch = batch.replace(
        advantages_BT=torch.tensor([[0, 1.0]]),
        returns_BT=torch.zeros(1, 2),
        loss_weight_BT=algorithm.loss_weights(batch.completion_mask_BT),
    )
    output = PolicyOutput(torch.zeros(1, 2), torch.tensor([[0, 2.0]]), torch.tensor([[0, 1.0]]))
    loss, metrics = algorithm.loss(batch, output)
    assert metrics["critic/loss"].item() == pytest.approx(0.5, abs=1e-6)
    assert metrics["policy/loss"].item() == pytest.approx(-1.2, abs=1e-6)
    assert loss.item() == pytest.approx(-0.7, abs=1e-6)


def test_the_pessimistic_value_wins_where_the_clip_would_hide_an_error():
    # value 1.0 hits the return, but the clipped 0.7 misses it by 0.3: the larger error 0.09 / 2 counts
    batch = batch_of([[1]], [0.0], 1, old_logprobs_BT=torch.zeros(1, 1), values_BT=torch.tensor([[0.5]]))
    batch = batch.replace(advantages_BT=torch.zeros(1, 1), returns_BT=torch.ones(1, 1), loss_weight_BT=torch.ones(1, 1))
    output = PolicyOutput(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
    assert PPO().loss(batch, output)[1]["critic/loss"].item() == pytest.approx(0.045, abs=1e-6)


def test_process_advantages_add_up_the_standardised_rewards_still_to_come():
    # Two rows of one group; rewards of steps: 1 after token 0 and 0 after token 2, and 1 after token 1.
    # mean 2/3, sample variance (1/9 + 4/9 + 1/9) / 2 = 1/3: scores +0.57735, -1.15470, +0.57735.
    batch = batch_of(
        [[1, 1, 1], [1, 1, 1]],
        [1.0, 1.0],
        2,
        step_rewards_BT=torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]),
        step_ends_BT=torch.tensor([[True, False, True], [False, True, False]]),
    )
    advantages = GRPO(std_floor=1e-9).advantages(batch).advantages_BT
    assert advantages is not None
    # row 0: 0.57735 - 1.15470, then -1.15470 twice; row 1: 0.57735 until its step, then nothing more to come
    assert advantages.tolist()[0] == pytest.approx([-0.57735, -1.15470, -1.15470], abs=1e-5)
    assert advantages.tolist()[1] == pytest.approx([0.57735, 0.57735, 0.0], abs=1e-5)


def test_an_outcome_that_is_the_only_reward_gives_the_same_advantages_as_an_event():
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 0]], dtype=torch.bool)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0])
    last = at_last_token(torch.ones(4), mask) > 0
    plain = batch_of(mask.tolist(), rewards.tolist(), 2)
    dense = plain.replace(step_rewards_BT=at_last_token(rewards, mask), step_ends_BT=last)
    one, other = (GRPO().advantages(b).advantages_BT for b in (plain, dense))
    assert one is not None and other is not None
    assert torch.allclose(one, other, atol=1e-6)


def test_equal_step_rewards_and_groups_without_steps_give_exact_zeros():
    steps = torch.tensor([[0.3, 0.0], [0.3, 0.3], [0.0, 0.0], [0.0, 0.0]])
    batch = batch_of([[1, 1]] * 4, [0.3] * 4, 2, step_rewards_BT=steps, step_ends_BT=steps > 0)
    advantages = GRPO().advantages(batch).advantages_BT
    assert advantages is not None
    assert (advantages == 0).all()


def test_ppo_pays_a_step_where_it_ends():
    # rewards 0.5 after the first and 1 after the last of three tokens, values 0: returns with lambda = gamma = 1
    batch = batch_of([[1, 1, 1]], [1.5], 1, values_BT=torch.zeros(1, 3))
    batch = batch.replace(
        step_rewards_BT=torch.tensor([[0.5, 0.0, 1.0]]), step_ends_BT=torch.tensor([[True, False, True]])
    )
    returns = PPO(kl_beta=0).advantages(batch).returns_BT
    assert returns is not None
    assert returns.tolist()[0] == pytest.approx([1.5, 1.0, 1.0], abs=1e-6)
