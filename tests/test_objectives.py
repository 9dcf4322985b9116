"""What the recorded numbers of the objectives do not show: float32 rounding, extremes, claims, refusals."""

import math
from functools import partial

import pytest
import torch
from cohort.algorithms._advantages import group_centred, group_standardised, leave_one_out, shrunk_leave_one_out, to_go
from cohort.algorithms.dapo import DAPO
from cohort.algorithms.dppo import DPPO, _binary_kl
from cohort.algorithms.gmpo import GMPO
from cohort.algorithms.grpo import GRPO
from cohort.algorithms.gspo import GSPO
from cohort.algorithms.kl_cov import KLCov
from cohort.algorithms.maxrl import MaxRL, _by_the_mean
from cohort.algorithms.online_dpo import OnlineDPO
from cohort.algorithms.opo import OPO
from cohort.algorithms.optimal_token_baseline import OptimalTokenBaseline
from cohort.algorithms.ppo import PPO
from cohort.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from cohort.algorithms.rloo import RLOO
from cohort.algorithms.vespo import VESPO
from cohort.harness.data import PolicyOutput
from cohort.harness.run.grading import score
from cohort.harness.settings.run import parse_run
from fakes import batch_of, graded_group


def loss_and_gradient(algorithm, batch, logprobs):
    batch = batch.replace(loss_weight_BT=algorithm.loss_weights(batch.completion_mask_BT.to(logprobs.dtype)))
    leaf = logprobs.clone().requires_grad_()
    loss, _ = algorithm.loss(batch, PolicyOutput(leaf, torch.zeros_like(leaf)))
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad


def test_log_probs_of_sampling_are_read_for_a_kl_in_the_reward_alone():
    for algorithm in (PPO, RLOO, ReinforcePlusPlus, partial(GRPO, kl_in="reward")):
        assert algorithm(kl_beta=0.1).needs_old_logprobs and not algorithm(kl_beta=0.0).needs_old_logprobs
    assert not GRPO(kl_beta=0.1).needs_old_logprobs


def test_the_weights_of_a_mean_over_tokens_add_up_to_one_if_there_are_any():
    for num_tokens, total in ((0, 0.0), (1, 1.0), (3, 1.0)):
        assert DAPO().loss_weights(torch.arange(4)[None] < num_tokens).sum() == pytest.approx(total)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 1e-3, 1e8])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_equal_rewards_give_exact_zeros(value, size):
    rewards = value * torch.tensor([[1.0], [2.0], [3.0]]).expand(3, size)  # equal in each group
    leads = leave_one_out(rewards), shrunk_leave_one_out(rewards)
    for credit in (group_centred(rewards), *leads, group_standardised(rewards, 1e-4)):
        assert torch.equal(credit, torch.zeros(3, size))


def test_the_mean_of_the_other_groups_counts_by_their_noise_and_their_spread():
    # group 1: the others' means 1/3 and 0 have mean 1/6 and spread 1/36, their noise is (2/3 / 6 + 0) / 2 = 1/18, so
    # the weight is 2/3 * (1/18) / (1/18 + 1/36) = 4/9; group 2: mean 2/3, spread 1/9, weight 2/3 * (1/18) / (1/6) = 2/9
    found = shrunk_leave_one_out(torch.tensor([[1.0, 0, 0], [1, 1, 1], [0, 0, 0]]))
    assert found[1].tolist() == pytest.approx([4 / 9 * (1 - 1 / 6)] * 3)
    assert found[2].tolist() == pytest.approx([2 / 9 * (0 - 2 / 3)] * 3)


def test_equal_step_rewards_and_groups_without_steps_give_exact_zeros():
    steps = torch.tensor([[0.3, 0.0], [0.3, 0.3], [0.0, 0.0], [0.0, 0.0]])
    batch = batch_of([[1, 1]] * 4, [0.3] * 4, 2, step_rewards_BT=steps, step_ends_BT=steps > 0)
    advantages = GRPO().advantages(batch).advantages_BT
    assert advantages is not None
    assert (advantages == 0).all()


@pytest.mark.parametrize(("weight", "up"), [(1.0, 0.8660254), (0.5, 0.4330127), (0.0, 0.0)])
def test_a_weight_of_positive_advantages_leaves_the_negative_ones_as_they_are(weight, up):
    # group of 1, 0, 0, 1: mean 1/2, standard deviation sqrt(4/4/3) = 0.57735
    advantages = GRPO(positive_weight=weight, std_floor=1e-9).advantages(batch_of([[1]] * 4, [1.0, 0.0, 0.0, 1.0], 4))
    assert advantages.advantages_BT.flatten().tolist() == pytest.approx([up, -0.8660254, -0.8660254, up], abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # The second group is certain: no noise, so the first one's baseline is not shrunk. The first has v = 1/4 and
        # s = 0, so w = 1/2: half of its mean 1/2 and half of the second's own 1.
        ([[1.0, 0.0], [1.0, 1.0]], [[1.0, -1.0], [0.25, 0.25]]),
        # the first group's others: means 1/2 and 1, v = (1/4 + 0) / 2, s = 1/16, w = 2/3 * 2/3; baseline 4/9 * 3/4
        ([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]], [[-1 / 3, -1 / 3], [1.0, -1.0], [1 / 3, 1 / 3]]),
        ([[1.0, 0.0]], [[1.0, -1.0]]),  # alone
    ],
)
def test_a_baseline_is_shrunk_by_what_the_other_groups_say_of_noise(rewards, expected):
    assert torch.allclose(shrunk_leave_one_out(torch.tensor(rewards)), torch.tensor(expected), atol=1e-6, rtol=0)


def test_rewards_outside_the_mask_do_not_make_equal_ones_differ():
    mask = torch.tensor([[True] * 7 + [False]])
    for value in (0.1, -0.1):  # the float32 means of sevens are not exact, and the 0 that does not count lies beside
        assert torch.equal(group_centred(value * mask, mask), torch.zeros(1, 8))


def test_groups_of_equal_rewards_earn_nothing_with_the_baseline_of_reinforce_plus_plus():
    equal = batch_of([[1]] * 14, [0.1] * 7 + [0.3] * 7, 7)  # the float32 means of sevens are not exact
    advantages = ReinforcePlusPlus(kl_beta=0, baseline="group").advantages(equal).advantages_BT
    assert advantages is not None
    assert (advantages == 0).all()


@pytest.mark.parametrize("algorithm", [GRPO(), DAPO()])
def test_a_minibatch_without_tokens_has_no_weight(algorithm):
    assert torch.equal(algorithm.loss_weights(torch.zeros(2, 3, dtype=torch.bool)), torch.zeros(2, 3))


def test_an_outcome_that_is_the_only_reward_gives_the_same_advantages_as_an_event():
    plain = batch_of([[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 0]], [1.0, 0.0, 0.5, 0.0], 2)
    last = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 1], [0, 1, 0, 0]]) > 0
    dense = plain.replace(step_rewards_BT=plain.rewards_B[:, None] * last, step_ends_BT=last)
    one, other = (GRPO().advantages(b).advantages_BT for b in (plain, dense))
    assert one is not None and other is not None
    assert torch.allclose(one, other, atol=1e-6)


def test_dapos_rewards_have_the_papers_proportions():
    # the paper: 1 or -1, plus a penalty from 0 to -1. Limit 100, buffer 20: 90 tokens cost 0.5, 100 cost 1.
    spec = parse_run({"task": "arithmetic", "algorithm": "dapo"}, "test")
    lengths = {"num_tokens": (50, 90, 90, 100), "max_tokens": 100}
    group = graded_group([0, 0, 1, 1], correct=(True, True, False, False), **lengths)
    (paid,) = (found.totals for found in score(spec.rewards, [group]))
    assert [2 * reward - 1 for reward in paid] == pytest.approx([1, 0.5, -1.5, -2])


def test_a_stated_objective_names_the_bound_of_a_weight_and_the_sign_of_a_covariance():
    assert "weight_max" in DPPO.objective["clip"]
    assert "positive covariance only" in KLCov.objective["clip"]


@pytest.mark.parametrize("shift", [-0.4, 1e-4, 0.4])
def test_gspo_has_the_value_and_gradient_of_the_sequence_level_objective(shift):
    # eq. 5 and 7 as they stand, with the sequence ratio carrying the gradient
    draw = torch.Generator().manual_seed(0)
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
    old = -torch.rand(3, 4, generator=draw, dtype=torch.float64) * mask
    now = (old + shift * torch.rand(3, 4, generator=draw, dtype=torch.float64)) * mask
    advantages_B1 = torch.tensor([[1.0], [-0.5], [0.25]], dtype=torch.float64)
    batch = batch_of(mask.tolist(), [0.0] * 3, 3, old_logprobs_BT=old, advantages_BT=advantages_B1 * mask)
    loss, gradient = loss_and_gradient(GSPO(), batch, now)
    leaf = now.clone().requires_grad_()
    ratio = torch.exp(((leaf - old) * mask).sum(1) / mask.sum(1))
    a = advantages_B1[:, 0]
    direct = -torch.minimum(ratio * a, ratio.clamp(1 - 3e-4, 1 + 4e-4) * a).mean()
    direct.backward()
    assert leaf.grad is not None
    assert loss == pytest.approx(direct.item(), abs=1e-9)
    assert torch.allclose(gradient, leaf.grad, atol=1e-9, rtol=0)


@pytest.mark.parametrize("gap", [-400.0, 400.0])
def test_online_dpo_stays_finite_for_a_hopeless_or_a_settled_pair(gap):
    # margins of -+400 nats: the push is 1 or 0 in float32, and the loss is bounded by its smallest probability
    algorithm = OnlineDPO(kl_beta=1.0)
    old = torch.tensor([[0.0, gap], [0.0, 0.0]])
    batch = batch_of([[0, 1], [0, 1]], [1.0, 0.0], 2, old_logprobs_BT=old, ref_logprobs_BT=torch.zeros(2, 2))
    loss, gradient = loss_and_gradient(algorithm, algorithm.advantages(batch), old)
    assert math.isfinite(loss)
    assert gradient[:, 1].tolist() == pytest.approx([-1.0, 1.0] if gap < 0 else [0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DAPO(ratio_bound=1.2), "algorithm.ratio_bound must be at least the upper clip, 1.28, got 1.2; raise"),
        (lambda: ReinforcePlusPlus(group_size=1, baseline="group"),
         "group_size must be at least 2 with algorithm.baseline=group, got 1"),
        (lambda: GRPO(kl_in="reward", kl_importance_weighted=True),
         "kl_importance_weighted must be false with algorithm.kl_in=reward, where the ratio is 1, got true; leave"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
    assert GRPO(ratio_bound=1.2).ratio_bound == 1.2  # at the upper clip itself


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # the mean is 0 but for rounding: the largest counts as the only one that is right, so A = (r - 0) / (1 / 6)
        ([1.0] + [-0.2] * 5, [6.0] + [-1.2] * 5),
        ([0.3] + [-0.1] * 3, [4.0] + [-4 / 3] * 3),  # 0.3 / (0.3 / 4)
        # mean 0.02 below 1 / 5; mean -0.4 below 0: (1 - 0.02) * 5, and (1 + 0.4) * 5
        ([1.0] + [-0.225] * 4, [4.9] + [-1.225] * 4),
        ([1.0] + [-0.75] * 4, [7.0] + [-1.75] * 4),
        # a penalty larger than any reward: mean 0.125, max |r| / 4 = 0.25
        ([0.75, 0.75, -1.0, 0.0], [2.5, 2.5, -4.5, -0.5]),
        # without rewards below 0 the mean is all that counts: 1 / 4, 3 / 8
        ([1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),
        ([1.0, 0.5, 0.0, 0.0], [5 / 3, 1 / 3, -1.0, -1.0]),
        # nothing is right, the last up to the rounding of 0.1 + 0.2 - 0.3
        ([0.0, -0.5, -1.0], [0.0] * 3),
        ([0.0] * 3, [0.0] * 3),
        ([5.6e-17, -0.5, -1.0], [0.0] * 3),
    ],
)
def test_maxrl_divides_by_the_mean_and_never_by_its_rounding(rewards, expected):
    batch = batch_of([[1]] * len(rewards), rewards, len(rewards))
    advantages = MaxRL().advantages(batch).advantages_BT
    assert advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_maxrl_counts_the_steps_of_a_group_alone():
    # two rows of two tokens, a step at the end of three: rewards 1, -0.5, -0.5 with a mean of 0, so 1 / (1 / 3)
    steps = torch.tensor([[1.0, -0.5], [9.0, -0.5]])
    ends = torch.tensor([[True, True], [False, True]])
    batch = batch_of([[1, 1]] * 2, [0.5, -0.5], 2, step_rewards_BT=steps, step_ends_BT=ends)
    advantages = MaxRL().advantages(batch).advantages_BT
    assert advantages is not None  # 3 at the first end, -1.5 at each later one, summed from each token on
    assert advantages.tolist() == [pytest.approx([1.5, -1.5], abs=1e-6), pytest.approx([-1.5, -1.5], abs=1e-6)]


def test_the_scale_of_one_group_does_not_reach_another():
    rewards = [0.3, -0.1, -0.1, -0.1, 30.0, -10.0, -10.0, -10.0]  # 0.3 / (0.3 / 4) and 30 / (30 / 4), as above
    advantages = MaxRL().advantages(batch_of([[1]] * 8, rewards, 4)).advantages_BT
    assert advantages[:, 0].tolist() == pytest.approx([4.0, *[-4 / 3] * 3] * 2, abs=1e-5)


def test_a_reward_that_is_alone_in_its_group_earns_nothing():
    mask = torch.tensor([[True, False], [False, False]])  # one is counted, and none: no deviation to divide by
    rewards = torch.tensor([[3.0, 1.0], [3.0, 1.0]])
    for of_batch in (False, True):
        assert torch.equal(group_standardised(rewards, 1e-4, mask, of_batch=of_batch), torch.zeros(2, 2))
    # two rewards of a batch have a deviation: 1 / sqrt(2)
    credit = group_standardised(rewards[:1], 1e-9, of_batch=True)
    assert credit[0].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-6)


def test_the_divergence_of_a_token_that_has_become_certain_is_finite():
    # 0.5 ln(0.5 / 1) + 0.5 ln((0.5 + 1e-8) / (0 + 1e-8)) = -0.346574 + 8.863761
    assert _binary_kl(torch.tensor(0.5).log(), torch.tensor(0.0)).item() == pytest.approx(8.517187, abs=1e-4)
    assert _binary_kl(torch.tensor(0.0), torch.tensor(-0.1)).item() == pytest.approx(0.1)  # that was: 1 * (0 + 0.1)


def test_values_to_go_are_discounted_once_for_each_token_in_between():
    # 1 + 2 / 2 + 4 / 4, 2 + 4 / 2, 4
    assert to_go(torch.tensor([[1.0, 2, 4]]), gamma=0.5).tolist() == [[3, 4, 4]]


@pytest.mark.parametrize("algorithm", [GMPO(), GSPO(), VESPO()], ids=lambda one: one.name)
def test_a_ratio_of_a_row_is_that_of_its_own_tokens_however_far_they_have_moved(algorithm):
    mask = torch.tensor([[True, True, False], [True, False, False]])
    old = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, 0.0, 0.0]])
    advantages = mask * torch.tensor([[1.0], [-1.0]])
    batch = batch_of(mask.tolist(), [1.0, 0.0], 2, old_logprobs_BT=old, advantages_BT=advantages)
    for moved in (0.1, -80.0, 80.0):  # nats
        expected, gradient = loss_and_gradient(algorithm, batch, (old + moved) * mask)
        loss, same = loss_and_gradient(algorithm, batch, (old + moved).where(mask, torch.tensor(7.0)))
        assert loss == expected and torch.equal(same, gradient) and gradient.isfinite().all()


def test_rewards_over_their_mean_have_no_scale_and_groups_without_a_gain_no_credit():
    found = _by_the_mean(torch.tensor([[1.0, 0.0], [-0.2, -0.1], [1e-8, 0.0]]), None)
    assert found.tolist() == [[1, -1], [0, 0], [1, -1]]  # (1 - 0.5) / 0.5


def test_an_answer_without_tokens_has_no_share_in_the_baseline_of_lengths():
    batch = batch_of([[True, False], [False, False]], [1.0, 0.0], 2)
    assert OPO().advantages(batch).advantages_BT.tolist() == [[0, 0], [0, 0]]  # baseline (1 * 0.5 + 0) / 1


def test_certain_tokens_have_no_weight_in_the_baseline_of_least_variance():
    # 1 - 2 p + (sum of p^2) at p = 1 is 0, and may be -1e-6 by rounding: the baseline is 0
    tokens, collision = [[True, True]] * 2, torch.tensor([[1 - 1e-6, 1.0], [1.0, 1.0]])
    batch = batch_of(tokens, [1.0, 0.0], 2, old_logprobs_BT=torch.zeros(2, 2), collision_BT=collision)
    assert OptimalTokenBaseline().advantages(batch).advantages_BT.tolist() == [[0.5, 0.5], [-0.5, -0.5]]


def test_values_outside_the_completions_count_for_nothing():
    # lambda 0.5: the last token 1 - 2 = -1, the one before it 0 + 2 - 1 + 0.5 * -1 = 0.5; returns: 1.5 and 1
    batch = batch_of([[True, True, False]] * 2, [1.0, 1.0], 2, values_BT=torch.tensor([[1.0, 2.0, 9.0]] * 2))
    found = PPO(gae_lambda=0.5, whiten_advantages=False).advantages(batch)
    assert found.advantages_BT[0].tolist() == [0.5, -1, 0] and found.returns_BT[0].tolist() == [1.5, 1, 0]
