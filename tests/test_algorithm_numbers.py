"""What each algorithm does that the others do not, in numbers worked out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from cohort.algorithms.cispo import CISPO
from cohort.algorithms.dapo import DAPO
from cohort.algorithms.dppo import DPPO
from cohort.algorithms.dr_grpo import DrGRPO
from cohort.algorithms.gmpo import GMPO
from cohort.algorithms.grpo import GRPO
from cohort.algorithms.gspo import GSPO
from cohort.algorithms.kl_cov import KLCov
from cohort.algorithms.lite_ppo import LitePPO
from cohort.algorithms.maxrl import MaxRL
from cohort.algorithms.online_dpo import OnlineDPO
from cohort.algorithms.opo import OPO
from cohort.algorithms.pass_at_k import PassAtK
from cohort.algorithms.ppo import PPO
from cohort.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from cohort.algorithms.remax import ReMax
from cohort.algorithms.rgra import RGRA
from cohort.algorithms.rloo import RLOO
from cohort.algorithms.sapo import SAPO
from cohort.harness.data import PolicyOutput
from cohort.harness.run.grading import score
from cohort.harness.spec.run import parse_run
from fakes import graded_group
from test_objectives import batch_of


def weighted(algorithm, batch, advantages=None):
    """The batch ready for the loss, with these advantages per row or its own."""
    if advantages is None:
        batch = algorithm.advantages(batch)
    else:
        batch = batch.replace(advantages_BT=torch.tensor(advantages)[:, None] * batch.completion_mask_BT)
    return batch.replace(loss_weight_BT=algorithm.loss_weights(batch.completion_mask_BT))


def loss_and_gradient(algorithm, batch, logprobs):
    leaf = logprobs.clone().requires_grad_()
    loss, metrics = algorithm.loss(batch, PolicyOutput(leaf, torch.zeros_like(leaf), batch.values_BT))
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad, metrics


def approx(values):
    return pytest.approx(values, abs=1e-6)


def test_dr_grpo_divides_the_sum_over_tokens_by_a_constant():
    # advantages 1/2 and -1/2; three tokens and one: -(3 * 0.5 - 1 * 0.5) / (2 rows * 10) = -0.05 at a ratio of 1
    algorithm = DrGRPO(loss_denominator=10)
    batch = weighted(algorithm, batch_of([[1, 1, 1], [1, 0, 0]], [1.0, 0.0], 2, old_logprobs_BT=torch.zeros(2, 3)))
    assert batch.advantages_BT is not None
    assert batch.advantages_BT.tolist() == [[0.5, 0.5, 0.5], [-0.5, 0, 0]]
    loss, gradient, _ = loss_and_gradient(algorithm, batch, torch.zeros(2, 3))
    assert loss == approx(-0.05)
    assert gradient.tolist() == [approx([-0.025] * 3), approx([0.025, 0, 0])]


def test_dr_grpo_still_reports_means():
    algorithm = DrGRPO(loss_denominator=1000)
    batch = weighted(algorithm, batch_of([[1, 1, 1], [1, 0, 0]], [1.0, 0.0], 2, old_logprobs_BT=torch.zeros(2, 3)))
    _, metrics = algorithm.loss(batch, PolicyOutput(torch.zeros(2, 3), 0.7 * batch.completion_mask_BT))
    assert metrics["policy/entropy"].item() == approx(0.7)


def test_dr_grpo_centres_the_rewards_of_steps():
    # step rewards 1, 0 and 1, mean 2/3: +1/3 and -2/3 in row 0, +1/3 in row 1; a token gets what is still to come
    batch = batch_of([[1, 1, 1], [1, 1, 1]], [1.0, 1.0], 2)
    batch = batch.replace(
        step_rewards_BT=torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]),
        step_ends_BT=torch.tensor([[True, False, True], [False, True, False]]),
    )
    advantages = DrGRPO().advantages(batch).advantages_BT
    assert advantages is not None
    assert advantages.tolist() == [approx([-1 / 3, -2 / 3, -2 / 3]), approx([1 / 3, 1 / 3, 0])]


def test_dapo_leaves_more_room_upwards_and_weighs_tokens_alike():
    # ratios 1.25 and 1.5 on a good row, 1 on a bad one: 1.25 lies inside 1.28; mean over 3 tokens
    algorithm = DAPO()
    batch = batch_of([[1, 1], [1, 0]], [1.0, 0.0], 2, old_logprobs_BT=torch.zeros(2, 2))
    batch = weighted(algorithm, batch, [1.0, -1.0])
    logprobs = torch.log(torch.tensor([[1.25, 1.5], [1.0, 1.0]]))
    loss, gradient, metrics = loss_and_gradient(algorithm, batch, logprobs)
    assert loss == approx(-(1.25 + 1.28 - 1) / 3)
    assert gradient.tolist() == [approx([-1.25 / 3, 0]), approx([1 / 3, 0])]
    assert metrics["policy/clip_fraction"].item() == approx(1 / 3)


def test_dapo_pays_for_accuracy_and_length():
    spec = parse_run({"task": "arithmetic", "algorithm": "dapo"}, "test")
    assert {name: reward.weight for name, reward in spec.rewards.items()} == {"accuracy": 1.0, "overlong": 0.5}


def test_dapos_rewards_have_the_papers_proportions():
    # the paper: 1 or -1, plus a penalty from 0 to -1. Limit 100, buffer 20: 90 tokens cost 0.5, 100 cost 1.
    spec = parse_run({"task": "arithmetic", "algorithm": "dapo"}, "test")
    lengths = {"num_tokens": (50, 90, 90, 100), "max_tokens": 100}
    group = graded_group([0, 0, 1, 1], correct=(True, True, False, False), **lengths)
    (paid,) = (found.totals for found in score(spec.rewards, [group]))
    assert [2 * reward - 1 for reward in paid] == pytest.approx([1, 0.5, -1.5, -2])
    ours, papers = (
        DAPO(std_floor=1e-9).advantages(batch_of([[1]] * 4, rewards, 4)).advantages_BT
        for rewards in (paid, [1, 0.5, -1.5, -2])
    )
    assert ours is not None and papers is not None
    assert ours.flatten().tolist() == approx(papers.flatten().tolist())


def test_gspo_takes_one_ratio_for_the_whole_answer():
    # token ratios 2 and 0.5: their geometric mean is 1, so nothing is clipped although both lie far outside
    algorithm = GSPO()
    batch = weighted(algorithm, batch_of([[1, 1]], [0.0], 1, old_logprobs_BT=torch.zeros(1, 2)), [1.0])
    loss, gradient, metrics = loss_and_gradient(algorithm, batch, torch.log(torch.tensor([[2.0, 0.5]])))
    assert loss == approx(-1)
    assert gradient[0].tolist() == approx([-0.5, -0.5])
    assert metrics["policy/clip_fraction"].item() == 0


@pytest.mark.parametrize("shift", [-0.4, -1e-4, 0.0, 1e-4, 0.4])
def test_gspo_has_the_value_and_gradient_of_the_sequence_level_objective(shift):
    # eq. 5 and 7 as they stand, with the sequence ratio carrying the gradient
    algorithm, draw = GSPO(), torch.Generator().manual_seed(0)
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
    old = -torch.rand(3, 4, generator=draw, dtype=torch.float64) * mask
    now = (old + shift * torch.rand(3, 4, generator=draw, dtype=torch.float64)) * mask
    advantages = [1.0, -0.5, 0.25]
    batch = batch_of(mask.tolist(), [0.0] * 3, 3, old_logprobs_BT=old)
    batch = weighted(algorithm, batch, advantages).replace(loss_weight_BT=algorithm.loss_weights(mask.double()))
    loss, gradient, _ = loss_and_gradient(algorithm, batch, now)
    leaf = now.clone().requires_grad_()
    ratio = torch.exp(((leaf - old) * mask).sum(1) / mask.sum(1))
    a = torch.tensor(advantages, dtype=torch.float64)
    direct = -torch.minimum(ratio * a, ratio.clamp(1 - 3e-4, 1 + 4e-4) * a).mean()
    direct.backward()
    assert leaf.grad is not None
    assert loss == pytest.approx(direct.item(), abs=1e-9)
    assert torch.allclose(gradient, leaf.grad, atol=1e-9, rtol=0)


def test_cispo_bounds_the_weight_of_a_token_and_keeps_its_gradient():
    # weights: 10 is cut at 5, 0.1 is left (no lower bound); gradient of weight * A * log-prob over 2 tokens, A = 2
    algorithm = CISPO()
    batch = weighted(algorithm, batch_of([[1, 1]], [0.0], 1, old_logprobs_BT=torch.zeros(1, 2)), [2.0])
    logprobs = torch.log(torch.tensor([[10.0, 0.1]]))
    loss, gradient, metrics = loss_and_gradient(algorithm, batch, logprobs)
    assert gradient[0].tolist() == approx([-5.0, -0.1])
    assert loss == approx(-(5 * 2 * math.log(10) + 0.1 * 2 * math.log(0.1)) / 2)
    assert metrics["policy/clip_fraction"].item() == 0.5


def test_rloo_compares_with_the_others_after_the_divergence_of_the_whole_answer():
    # beta 0.5; log-ratios to the reference sum to 0.4 (two tokens), 0 and -0.2: totals 1 - 0.2, 0 and 0.5 + 0.1;
    # minus the mean of the other two: 0.8 - 0.3, 0 - 0.7 and 0.6 - 0.4
    old = torch.tensor([[-1.0, -1.0], [-1.0, 0], [-1.0, 0]])
    ref = torch.tensor([[-1.3, -1.1], [-1.0, 0], [-0.8, 0]])
    batch = batch_of([[1, 1], [1, 0], [1, 0]], [1.0, 0.0, 0.5], 3, old_logprobs_BT=old, ref_logprobs_BT=ref)
    advantages = RLOO(kl_beta=0.5).advantages(batch).advantages_BT
    assert advantages is not None
    assert advantages.tolist() == [approx([0.5, 0.5]), approx([-0.7, 0]), approx([0.2, 0])]


def test_rloo_sums_over_tokens_and_weighs_a_later_update_by_the_ratio_of_the_answer():
    # token ratios 2 and 3 make 6; loss -6 * A / 1 row; every token's gradient is -6; clipped at 1.2 it has none
    batch = batch_of([[1, 1]], [0.0], 1, old_logprobs_BT=torch.zeros(1, 2))
    logprobs = torch.log(torch.tensor([[2.0, 3.0]]))
    for clip, loss, slope, fraction in ((None, -6.0, -6.0, 0), (0.2, -1.2, 0.0, 1)):
        algorithm = RLOO(clip_epsilon=clip)
        found, gradient, metrics = loss_and_gradient(algorithm, weighted(algorithm, batch, [1.0]), logprobs)
        assert found == pytest.approx(loss, abs=1e-5)
        assert gradient[0].tolist() == pytest.approx([slope, slope], abs=1e-5)
        assert metrics["policy/clip_fraction"].item() == fraction


def test_reinforce_plus_plus_normalises_the_reward_to_go_over_the_batch():
    # beta 0.1, log-ratios 1 and -2 in row 0: rewards -0.1 and 1 + 0.2, to go 1.1 and 1.2; row 1: 0.
    # mean 2.3 / 3, variance (1.21 + 1.44) / 3 - mean^2
    old = torch.tensor([[-1.0, -3.0], [-1.0, 0]])
    ref = torch.tensor([[-2.0, -1.0], [-1.0, 0]])
    batch = batch_of([[1, 1], [1, 0]], [1.0, 0.0], 1, old_logprobs_BT=old, ref_logprobs_BT=ref)
    mean, std = 2.3 / 3, math.sqrt(2.65 / 3 - (2.3 / 3) ** 2)
    advantages = ReinforcePlusPlus(kl_beta=0.1).advantages(batch).advantages_BT
    assert advantages is not None
    assert advantages.tolist() == [
        approx([(1.1 - mean) / std, (1.2 - mean) / std]),
        approx([-mean / std, 0]),
    ]


def test_reinforce_plus_plus_may_put_the_divergence_into_the_loss():
    # log-ratios to the reference 1 and -2, k2: 0.5 and 2, mean 1.25, times 0.1; its slope is the log-ratio / 2 * 0.1
    algorithm = ReinforcePlusPlus(kl_beta=0.1, kl_estimator="k2", kl_placement="loss")
    old, ref = torch.tensor([[-1.0, -3.0]]), torch.tensor([[-2.0, -1.0]])
    batch = batch_of([[1, 1]], [1.0], 1, old_logprobs_BT=old, ref_logprobs_BT=ref)
    batch = weighted(algorithm, batch)
    assert batch.advantages_BT is not None
    assert batch.advantages_BT.abs().max() == 0  # nothing of the divergence is in the reward
    loss, gradient, _ = loss_and_gradient(algorithm, batch, old)
    assert loss == approx(0.125)
    assert gradient[0].tolist() == approx([0.05, -0.1])
    assert not algorithm.needs_old_logprobs


def test_ppo_may_leave_its_advantages_as_they_are_and_take_another_estimator():
    # values 0, lambda 1: returns to go; k3 of a log-ratio of log 2 to the reference: 0.5 - 1 + log 2
    batch = batch_of(
        [[1, 1]], [1.0], 1, values_BT=torch.zeros(1, 2),
        old_logprobs_BT=torch.full((1, 2), math.log(0.5)), ref_logprobs_BT=torch.full((1, 2), math.log(0.25)),
    )  # fmt: skip
    k3 = math.log(2) - 0.5
    result = PPO(kl_beta=0.1, kl_estimator="k3", whiten_advantages=False).advantages(batch)
    assert result.advantages_BT is not None
    assert result.advantages_BT[0].tolist() == approx([1 - 0.2 * k3, 1 - 0.1 * k3])


def pair(rewards=(0.0, 1.0, 0.5), seed=0):
    """One group of three answers of 3, 1 and 2 tokens; float64 log-probs old, now and of the reference."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
    old, ref, change = (torch.randn(3, 4, generator=draw, dtype=torch.float64) * mask for _ in range(3))
    batch = batch_of(mask.tolist(), list(rewards), 3, old_logprobs_BT=old, ref_logprobs_BT=ref)
    return batch, old, old + 0.3 * change


def dpo_loss(logprobs, batch, best, worst, beta):
    """Eq. 7 for one pair, as autograd sees it."""
    gain = ((logprobs - batch.ref_logprobs_BT) * batch.completion_mask_BT).sum(1)
    return -F.logsigmoid(beta * (gain[best] - gain[worst]))


def in_float64(algorithm, batch):
    batch = algorithm.advantages(batch)
    return batch.replace(loss_weight_BT=algorithm.loss_weights(batch.completion_mask_BT.double()))


@pytest.mark.parametrize("beta", [0.05, 1.0, 5.0])
def test_online_dpo_starts_at_the_value_and_gradient_of_the_dpo_loss(beta):
    algorithm = OnlineDPO(kl_beta=beta)
    batch, old, _ = pair()
    loss, gradient, _ = loss_and_gradient(algorithm, in_float64(algorithm, batch), old)
    leaf = old.clone().requires_grad_()
    truth = dpo_loss(leaf, batch, best=1, worst=0, beta=beta)
    truth.backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().max() > 0.01
    assert loss == pytest.approx(truth.item(), abs=1e-9)
    assert torch.allclose(gradient, leaf.grad, atol=1e-9, rtol=0)


def test_online_dpo_later_follows_a_rows_own_movement_with_the_partner_where_it_was():
    algorithm = OnlineDPO(kl_beta=0.7)
    batch, old, now = pair()
    _, gradient, _ = loss_and_gradient(algorithm, in_float64(algorithm, batch), now)
    for row in (0, 1):
        held = old.clone()
        held[row] = now[row]
        held.requires_grad_()
        dpo_loss(held, batch, best=1, worst=0, beta=0.7).backward()
        assert held.grad is not None
        assert torch.allclose(gradient[row], held.grad[row], atol=1e-9, rtol=0)
    assert gradient[2].abs().sum() == 0


@pytest.mark.parametrize(
    ("rewards", "signs"),
    [
        ((0.0, 1.0, 0.5), [-1, 1, 0]),
        ((1.0, 0.0, 1.0), [1, -1, 0]),  # the first of the best
        ((0.0, 1.0, 0.0), [-1, 1, 0]),  # the first of the worst
        ((1.0, 1.0, 0.0), [1, 0, -1]),
    ],
)
def test_online_dpo_pairs_the_first_best_with_the_first_worst(rewards, signs):
    batch, _, _ = pair(rewards)
    advantages = OnlineDPO().advantages(batch).advantages_BT
    assert advantages is not None
    assert advantages[:, 1].sign().tolist() == signs


def test_online_dpo_learns_exactly_nothing_from_equal_rewards():
    algorithm = OnlineDPO()
    batch, _, now = pair((0.1, 0.1, 0.1))
    loss, gradient, _ = loss_and_gradient(algorithm, in_float64(algorithm, batch), now)
    assert loss == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("gap", [-400.0, 400.0])
def test_online_dpo_stays_finite_for_a_hopeless_or_a_settled_pair(gap):
    # margins of -+400 nats: the push is 1 or 0 in float32, and the loss is bounded by its smallest probability
    algorithm = OnlineDPO(kl_beta=1.0)
    old = torch.tensor([[0.0, gap], [0.0, 0.0]])
    batch = batch_of([[0, 1], [0, 1]], [1.0, 0.0], 2, old_logprobs_BT=old, ref_logprobs_BT=torch.zeros(2, 2))
    loss, gradient, _ = loss_and_gradient(algorithm, weighted(algorithm, batch), old)
    assert math.isfinite(loss)
    assert gradient[:, 1].tolist() == approx([-1.0, 1.0] if gap < 0 else [0.0, 0.0])


def test_whole_answer_algorithms_count_the_rewards_of_steps_with_their_total():
    batch = batch_of(
        [[1, 1], [1, 1]], [1.0, 0.0], 2, old_logprobs_BT=torch.zeros(2, 2), ref_logprobs_BT=torch.zeros(2, 2)
    )
    dense = batch.replace(step_rewards_BT=torch.tensor([[1.0, 0], [0, 0]]), step_ends_BT=torch.ones(2, 2) > 0)
    for algorithm in (RLOO(), OnlineDPO()):
        one, other = (algorithm.advantages(b).advantages_BT for b in (batch, dense))
        assert one is not None and other is not None
        assert torch.equal(one, other)
    assert not torch.equal(*(GRPO().advantages(b).advantages_BT for b in (batch, dense)))


def credit(algorithm, batch):
    """The advantages of the first token of every row."""
    advantages = algorithm.advantages(batch).advantages_BT
    assert advantages is not None
    return advantages[:, 0].tolist()


def moved_tokens(algorithm, ratios, advantages, old=-1.0):
    """(loss, gradient, clip fraction) of one row per advantage, whose tokens have these probability ratios."""
    ratio = torch.tensor(ratios)
    batch = batch_of([[1] * ratio.shape[1]] * len(ratios), [0.0] * len(ratios), len(ratios))
    batch = batch.replace(old_logprobs_BT=torch.full(ratio.shape, old))
    loss, gradient, metrics = loss_and_gradient(algorithm, weighted(algorithm, batch, advantages), old + ratio.log())
    return loss, gradient.tolist(), metrics["policy/clip_fraction"].item()


def test_maxrl_divides_by_the_mean_so_that_rare_right_answers_count_more():
    # means 1/4, 3/4 and 0: (1 - 1/4) / (1/4) = 3 and -1; (1 - 3/4) / (3/4) = 1/3 and -1; no right answer: 0
    batch = batch_of([[1]] * 12, [1.0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0], 4)
    assert credit(MaxRL(), batch) == approx([3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0, 0, 0])


def test_maxrl_takes_a_mean_that_is_not_positive_for_no_success():
    assert credit(MaxRL(), batch_of([[1]] * 4, [0.5, -1.0, 0.5, -0.5], 2)) == [0, 0, 0, 0]


def test_opos_baseline_weighs_rewards_by_length():
    # lengths 3 and 1, rewards 1 and 0: baseline 3/4, so 1/4 and -3/4; sums over tokens 3/4 and -3/4 cancel
    batch = batch_of([[1, 1, 1], [1, 0, 0]], [1.0, 0.0], 2)
    assert credit(OPO(), batch) == approx([0.25, -0.75])


def test_lite_ppo_divides_by_the_deviation_of_the_batch():
    # means 1/2 and 1; all rewards 1 0 1 1: mean 3/4, variance (3/16 + 9/16) / 3 = 1/4, so +-1/2 / 1/2
    batch = batch_of([[1]] * 4, [1.0, 0.0, 1.0, 1.0], 2)
    assert credit(LitePPO(std_floor=1e-12), batch) == approx([1, -1, 0, 0])
    assert credit(GRPO(std_floor=1e-12), batch) == approx([0.5**0.5, -(0.5**0.5), 0, 0])
    assert credit(GRPO(std_floor=1e-12, std_over="batch"), batch) == credit(LitePPO(std_floor=1e-12), batch)


def test_the_batchs_deviation_of_step_rewards_is_that_of_all_steps():
    # steps 1, 0 in one group and 1, 1 in the other: as the rewards of the test before
    ends = torch.tensor([[True], [True], [True], [True]])
    steps = torch.tensor([[1.0], [0.0], [1.0], [1.0]])
    batch = batch_of([[1]] * 4, [9.0] * 4, 2, step_rewards_BT=steps, step_ends_BT=ends)
    assert credit(LitePPO(std_floor=1e-12), batch) == approx([1, -1, 0, 0])


def test_gmpo_clips_each_tokens_log_ratio_before_the_mean():
    # log-ratios 1 and 0.2, cut at 0.4: mean 0.3 for A > 0, where the first token is cut; 0.6 for A < 0, where none is
    for advantage, nats, first in ((1.0, 0.3, 0.0), (-1.0, 0.6, 1.0)):
        loss, gradient, clipped = moved_tokens(GMPO(), [[math.e, math.exp(0.2)]], [advantage])
        assert loss == approx(-advantage * math.exp(nats))
        assert gradient[0] == approx([-advantage * math.exp(nats) / 2 * first, -advantage * math.exp(nats) / 2])
        assert clipped == approx(0.5 * (advantage > 0))


def test_sapos_gate_has_slope_one_on_policy_and_fades_faster_below():
    # tau 1 and 2. On policy: value 2 / tau, slope 1. At a ratio of 2: slope 4 s(tau) (1 - s(tau)), times the ratio 2
    algorithm = SAPO(tau_positive=1.0, tau_negative=2.0)
    loss, gradient, clipped = moved_tokens(algorithm, [[1.0], [1.0]], [1.0, -1.0])
    assert loss == approx((-2 + 1) / 2)
    assert [row[0] for row in gradient] == approx([-0.5, 0.5])
    assert clipped == 0
    _, gradient, _ = moved_tokens(algorithm, [[2.0], [2.0]], [1.0, -1.0])
    s1, s2 = (1 / (1 + math.exp(-tau)) for tau in (1, 2))
    assert [row[0] for row in gradient] == approx([-4 * s1 * (1 - s1), 4 * s2 * (1 - s2)])


def test_dppo_goes_by_probability_where_a_clip_goes_by_the_ratio():
    # a rare token of probability 0.01 may grow eightfold (moved by 0.07); one of 0.5 may not grow by 0.2
    algorithm = DPPO(loss_denominator=1)
    assert moved_tokens(algorithm, [[8.0]], [1.0], math.log(0.01)) == (approx(-8), [approx([-8.0])], 0)
    assert moved_tokens(algorithm, [[1.4]], [1.0], math.log(0.5)) == (0, [[0]], 1)
    assert moved_tokens(algorithm, [[1.4]], [-1.0], math.log(0.5)) == (approx(1.4), [approx([1.4])], 0)  # comes back
    assert moved_tokens(algorithm, [[0.6]], [-1.0], math.log(0.5)) == (0, [[0]], 1)


def test_dppo_may_bound_the_weight_and_measure_nats():
    # KL of 1/2 against 0.6: 0.5 log(5/6) + 0.5 log(5/4) = 0.0204; of 0.01 against 0.08: 0.0486
    assert 0.5 * math.log(0.5 / 0.6) + 0.5 * math.log(0.5 / 0.4) == pytest.approx(0.0204, abs=1e-4)
    near, far = (DPPO(loss_denominator=1, divergence="kl", divergence_bound=b) for b in (0.021, 0.020))
    assert moved_tokens(near, [[1.2]], [1.0], math.log(0.5))[2] == 0
    assert moved_tokens(far, [[1.2]], [1.0], math.log(0.5))[2] == 1
    bounded = DPPO(loss_denominator=1, weight_max=3.0)
    assert moved_tokens(bounded, [[8.0]], [1.0], math.log(0.01)) == (approx(-3), [approx([-3.0])], 0)


def test_rgra_never_asks_how_far_a_token_has_moved():
    # A * log-prob over two tokens: -(log-probs) / 2 for A = 1, and a slope of -1/2 each
    loss, gradient, clipped = moved_tokens(RGRA(), [[100.0, 0.01]], [1.0])
    assert loss == approx(1.0)  # (1 - log 100 + 1 + log 100) / 2
    assert gradient[0] == approx([-0.5, -0.5])
    assert clipped == 0


def test_kl_cov_holds_the_token_that_would_cost_most_entropy():
    # advantages 1 and -1, old log-probs -1 -3 and -1 -3 (mean -2): covariances 1 -1 and -1 1; a quarter is one token
    algorithm = KLCov(covariance_share=0.25, penalty=0.5, std_floor=1e-12)
    old = torch.tensor([[-1.0, -3.0], [-1.0, -4.0]])  # mean -2.25: 1.25 -0.75 and -1.25 1.75, so the last is held
    batch = weighted(algorithm, batch_of([[1, 1], [1, 1]], [1.0, 0.0], 2, old_logprobs_BT=old))
    assert batch.held_BT is not None
    assert batch.held_BT.tolist() == [[False, False], [False, True]]
    a = 0.5**0.5
    loss, gradient, _ = loss_and_gradient(algorithm, batch, old + math.log(2))
    assert loss == approx((-2 * a * 2 + 2 * a * 2 + 0.5 * math.log(2)) / 4)
    assert gradient.tolist() == [approx([-a / 2, -a / 2]), approx([a / 2, a / 2 + 0.125])]


def test_pass_at_k_pays_the_best_answer_its_lead():
    # 3 1 2: 3 - 2; a tie and equal rewards: nothing
    batch = batch_of([[1]] * 9, [3.0, 1.0, 2.0, 1.0, 0.0, 1.0, 0.5, 0.5, 0.5], 3)
    assert credit(PassAtK(), batch) == approx([1, 0, 0, 0, 0, 0, 0, 0, 0])


def test_remax_compares_with_the_greedy_answer():
    batch = batch_of([[1]] * 4, [1.0, 0.0, 1.0, 0.0], 2, greedy_rewards_B=torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert credit(ReMax(), batch) == approx([1, 0, 0, -1])


@pytest.mark.parametrize("algorithm", [GRPO(kl_beta=0, ratio_bound=3), PPO(kl_beta=0, ratio_bound=3)])
def test_a_bound_on_the_ratio_holds_bad_answers_that_became_likely(algorithm):
    # A = -1: a ratio of 2 counts as it is, 5 as 3 and without gradient; A = 1: the clip at 1.2 comes first
    tensors = {"values_BT": torch.zeros(1, 1), "returns_BT": torch.zeros(1, 1), "old_logprobs_BT": torch.zeros(1, 1)}
    for ratio, advantage, loss, slope in ((2, -1.0, 2, 2), (5, -1.0, 3, 0), (5, 1.0, -1.2, 0)):
        batch = weighted(algorithm, batch_of([[1]], [0.0], 1, **tensors), [advantage])
        _, gradient, metrics = loss_and_gradient(algorithm, batch, torch.tensor([[math.log(ratio)]]))
        assert metrics["policy/loss"].item() == approx(loss)
        assert gradient[0].tolist() == approx([slope])
        assert metrics["policy/clip_fraction"].item() == (slope == 0)


def test_a_bound_below_the_clip_is_refused():
    with pytest.raises(
        ValueError, match=r"algorithm.ratio_bound must be at least the upper clip, 1.28, got 1.2; raise"
    ):
        DAPO(ratio_bound=1.2)


def test_the_divergence_may_be_weighed_by_the_ratio():
    # ratio 2, log-ratio to the reference log 2: k3 = 1/2 - 1 + log 2, times 2; slope 2 (k3 + 1 - 1/2), times beta 0.5
    algorithm = GRPO(kl_beta=0.5, kl_importance_weighted=True)
    now = torch.tensor([[-1.0]])
    batch = batch_of([[1]], [0.0], 1, old_logprobs_BT=now - math.log(2), ref_logprobs_BT=now - math.log(2))
    loss, gradient, _ = loss_and_gradient(algorithm, weighted(algorithm, batch, [0.0]), now)
    k3 = math.log(2) - 0.5
    assert loss == approx(0.5 * 2 * k3)
    assert gradient[0].tolist() == approx([0.5 * 2 * (k3 + 0.5)])


def test_reinforce_plus_plus_discounts_the_reward_to_go():
    # gamma 1/2, reward 1 on the last of two tokens: 1/2 and 1, mean 3/4, deviation 1/4
    advantages = ReinforcePlusPlus(kl_beta=0, gamma=0.5).advantages(batch_of([[1, 1]], [1.0], 1)).advantages_BT
    assert advantages is not None
    assert advantages[0].tolist() == approx([-1, 1])


def test_reinforce_plus_plus_may_take_the_groups_mean_first():
    # means 1/2 and 3: +-1/2 and +-1; variance 5/8 over four tokens. Without: 1 0 4 2
    batch = batch_of([[1]] * 4, [1.0, 0.0, 4.0, 2.0], 2)
    scale = math.sqrt(5 / 8)
    algorithm = ReinforcePlusPlus(kl_beta=0, baseline="group")
    assert credit(algorithm, batch) == approx([0.5 / scale, -0.5 / scale, 1 / scale, -1 / scale])
    dense = batch.replace(step_rewards_BT=batch.rewards_B[:, None], step_ends_BT=torch.ones(4, 1) > 0)
    assert credit(algorithm, dense) == approx(credit(algorithm, batch))
    equal = batch_of([[1]] * 14, [0.1] * 7 + [0.3] * 7, 7)  # the float32 means of sevens are not exact
    assert credit(algorithm, equal) == [0] * 14


def test_a_group_of_one_has_no_mean_of_others():
    with pytest.raises(ValueError, match=r"group_size must be at least 2 with algorithm.baseline=group, got 1"):
        ReinforcePlusPlus(group_size=1, baseline="group")
