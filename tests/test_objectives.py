"""The numbers of every objective, against hand arithmetic and float64 references written out here."""

import math

import numpy as np
import pytest
import torch

from algorithms._objectives import at_last_token, clipped_surrogate, generalised_advantages, group_standardised
from algorithms.grpo import GRPO
from algorithms.grpo_self_consistency import GRPOSelfConsistency
from algorithms.ppo import PPO
from harness.tensors import kl_k1, kl_k3, whiten
from harness.types import Batch, GradedGroup, PolicyOutput


def graded(classes, correct=None):
    n = len(classes)
    answers = tuple(None if c is None else str(c) for c in classes)
    return GradedGroup("p", ("",) * n, (1,) * n, (False,) * n, answers, tuple(classes), correct)


def batch_of(mask, rewards, group_size, **tensors):
    mask = torch.tensor(mask, dtype=torch.bool)
    return Batch(
        tokens_BT=torch.zeros(mask.shape, dtype=torch.int64),
        completion_mask_BT=mask,
        lengths_B=torch.full((len(mask),), mask.shape[1]),
        truncated_B=torch.zeros(len(mask), dtype=torch.bool),
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
    logprobs = torch.log(torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1]]))
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 2.0]])
    loss, clipped = clipped_surrogate(logprobs, torch.zeros(1, 5), advantages, 0.2)
    assert loss[0].tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8, -2.2], abs=1e-6)
    assert clipped[0].tolist() == [True, False, False, True, False]


def test_clipped_tokens_carry_no_gradient():
    logprobs = torch.log(torch.tensor([[1.5, 1.1]])).requires_grad_()
    clipped_surrogate(logprobs, torch.zeros(1, 2), torch.ones(1, 2), 0.2)[0].sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, -1.1], abs=1e-6)


def test_kl_estimators_equal_their_formulas():
    # log p = log 0.5, log q = log 0.25: k1 = log 2, k3 = 0.5 - 1 + log 2
    p, q = torch.log(torch.tensor(0.5)), torch.log(torch.tensor(0.25))
    assert kl_k1(p, q).item() == pytest.approx(math.log(2), abs=1e-6)
    assert kl_k3(p, q).item() == pytest.approx(math.log(2) - 0.5, abs=1e-6)


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


def test_votes_are_counted_over_classes_and_every_tied_class_wins():
    algorithm = GRPOSelfConsistency()
    assert algorithm.rewards(graded([0, 0, 1, None])) == [1.0, 1.0, -0.1, -0.1]
    assert algorithm.rewards(graded([0, 0, 1, 1, 2])) == [1.0, 1.0, 1.0, 1.0, -0.1]
    assert algorithm.rewards(graded([None, None, None, 3])) == [-0.1, -0.1, -0.1, 1.0]


def test_completions_without_an_answer_never_win():
    assert GRPOSelfConsistency().rewards(graded([None, None, None])) == [-0.1, -0.1, -0.1]


def test_self_consistency_ignores_gold():
    classes = [0, 1, 1, None]
    blind = GRPOSelfConsistency().rewards(graded(classes))
    for correct in [(True, False, False, False), (False, True, True, False)]:
        assert GRPOSelfConsistency().rewards(graded(classes, correct)) == blind


def test_an_algorithm_that_needs_gold_fails_loudly_without_it():
    for algorithm in (GRPO(), PPO()):
        with pytest.raises(AssertionError):
            algorithm.rewards(graded([0, 1]))
