"""What each algorithm does that the others do not, in numbers worked out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from fakes import graded_group
from test_objectives import batch_of

from algorithms.cispo import CISPO
from algorithms.dapo import DAPO
from algorithms.dr_grpo import DrGRPO
from algorithms.grpo import GRPO
from algorithms.gspo import GSPO
from algorithms.online_dpo import OnlineDPO
from algorithms.ppo import PPO
from algorithms.reinforce_plus_plus import ReinforcePlusPlus
from algorithms.rloo import RLOO
from harness.spec.run import parse_run
from harness.training.scoring import score
from harness.types import PolicyOutput


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
    ((*paid,),) = score(spec.rewards, [group]).totals
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
