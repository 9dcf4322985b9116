"""Rates, KL weight and reference over a run, and importance weights against a sampler with other probabilities."""

import math

import pytest
import torch
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run.learner import Learner, correct_mismatch
from cohort.harness.run.schedules import adapted_kl_beta, kl_beta_factor, learning_rate_factor
from cohort.harness.settings.run import KLControl, Mismatch, Optimizer, parse_run
from test_learner import make_batch
from test_train import BASE


def factors(steps, **settings):
    return [learning_rate_factor(Optimizer(**settings), step, steps) for step in range(steps)]


def test_the_learning_rate_rises_over_the_warm_up_and_falls_to_zero_after_the_last_step():
    assert factors(3) == [1, 1, 1]
    assert factors(4, warmup_steps=4) == [0.25, 0.5, 0.75, 1]
    assert factors(4, schedule="linear") == [1, 0.75, 0.5, 0.25]
    assert factors(6, schedule="linear", warmup_steps=2) == [0.5, 1, 1, 0.75, 0.5, 0.25]
    # (1 + cos(pi * t / 4)) / 2 for t = 0 .. 3
    assert factors(4, schedule="cosine") == pytest.approx([1, 0.853553, 0.5, 0.146447], abs=1e-6)
    learner = Learner(run(optimizer={"learning_rate": 1e-3, "warmup_steps": 2}), tiny_model(0))
    learner.start = 7  # of a stage, whose course is its own; a constant rate warms up too
    rates = [learner.begin_step(step)["optimizer/learning_rate"] for step in (7, 8, 9)]
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3])


def test_the_cosine_kl_weight_is_held_and_falls_and_the_adaptive_one_moves_by_a_tenth_of_the_error_cut_to_a_fifth():
    # step 9 is halfway between 10 % and 80 %
    assert [kl_beta_factor(step, 20) for step in (0, 2, 9, 16, 19)] == pytest.approx([1, 1, 0.5, 0, 0], abs=1e-9)
    settings = KLControl(schedule="adaptive", target=0.1)
    found = [adapted_kl_beta(settings, 0.5, divergence) for divergence in (0.11, 9.0, 0.0)]
    assert found == pytest.approx([0.5 * 1.01, 0.5 * 1.02, 0.5 * 0.98])


def run(**changes):
    algorithm = {"name": "grpo", "group_size": 4, "kl_beta": 0.1}
    return parse_run({**BASE, "algorithm": algorithm, **changes}, "test")


def test_scheduled_rates_and_weights_are_used_and_returned_as_metrics():
    rates = {"learning_rate": 1e-3, "critic_learning_rate": 5e-2, "schedule": "linear", "warmup_steps": 2}
    algorithm = {"name": "ppo", "group_size": 4, "kl_beta": 0.1}
    learner = Learner(run(algorithm=algorithm, optimizer=rates, kl={"schedule": "cosine"}, steps=6), tiny_model(0))
    factors = [0.5, 1, 1, 0.75, 0.5, 0.25]
    betas = [0.1, *(0.05 * (1 + math.cos(math.pi * (step / 6 - 0.1) / 0.7)) for step in (1, 2, 3, 4)), 0]
    for step, (factor, beta) in enumerate(zip(factors, betas, strict=True)):
        found = learner.begin_step(step)
        assert found == {"optimizer/learning_rate": pytest.approx(factor * 1e-3), "kl/beta": pytest.approx(beta)}
        used = [learner.optimizers[name].param_groups[0]["lr"] for name in ("policy", "critic")]
        assert used == [pytest.approx(factor * 1e-3), pytest.approx(factor * 5e-2)]
        assert learner.algorithm.kl_beta == pytest.approx(beta)
    assert Learner(run(), tiny_model(0)).begin_step(3) == {}


def test_the_course_of_the_policys_rate_begins_after_the_critics_warm_up_and_an_adaptive_kl_weight_waits_for_it():
    rates = {"learning_rate": 1e-3, "critic_learning_rate": 1.0, "schedule": "linear", "warmup_steps": 2}
    algorithm = {"name": "ppo", "group_size": 2, "kl_beta": 0.1}
    learner = Learner(
        run(algorithm=algorithm, optimizer=rates, critic={"warmup_steps": 2}, steps=6, rollouts_per_step=8,
            kl={"schedule": "adaptive", "target": 1.0}), tiny_model(0)
    )  # fmt: skip
    batch, used, betas = make_batch(learner.policy), [], []
    for step in range(6):
        learner.begin_step(step)
        used.append([learner.optimizers[name].param_groups[0]["lr"] for name in ("policy", "critic")])
        betas.append(learner.kl_beta)
        learner.optimizers["critic"].param_groups[0]["lr"] = 1e-4  # a rate that is fit for updates
        learner.update(learner.algorithm.advantages(learner.annotate(batch)), step)
    policy, critic = zip(*used, strict=True)
    # 4 steps of the policy: 1/2 and 1, then 1 and 1 - 1/2; 6 of the critic: 1/2, 1, then 1 - t/4
    assert policy[2:] == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.5e-3])
    assert critic == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])
    assert betas == pytest.approx([0.1, 0.1, 0.1, 0.098, 0.09604, 0.0941192])  # 2 % less after each of its steps


@pytest.mark.parametrize("name", ["dapo", "kl_cov", "ppo", "rloo", "remax"])  # KL in loss or reward, sums, a critic
def test_an_algorithm_trains_on_when_its_kl_weight_has_fallen_to_zero(name):
    algorithm = {"name": name, "group_size": 2, "kl_beta": 0.1}
    spec, policy = run(algorithm=algorithm, kl={"schedule": "cosine"}, rollouts_per_step=8, steps=5), tiny_model(0)
    learner, batch = Learner(spec, policy), make_batch(policy)
    found = []
    for step in range(5):
        scheduled = learner.begin_step(step)
        found.append(scheduled | learner.update(learner.algorithm.advantages(learner.annotate(batch)), step))
    assert [one["kl/beta"] for one in found][-1] == pytest.approx(0, abs=1e-12)
    assert "kl/reference" in found[0] and all(one.keys() == found[0].keys() for one in found)
    assert all(one["policy/grad_norm"] > 0 for one in found)


def test_a_refreshed_reference_is_the_policy_of_that_step():
    policy = tiny_model(0)
    spec = run(kl={"refresh_reference_every": 2}, rollouts_per_step=8, optimizer={"learning_rate": 1e-2})
    learner = Learner(spec, policy)
    batch = make_batch(policy).replace(group_size=4)
    for step in range(3):
        learner.begin_step(step)
        annotated = learner.annotate(batch)
        assert annotated.ref_logprobs_BT is not None
        with torch.no_grad():
            apart = (annotated.ref_logprobs_BT - learner.logprobs(policy, batch)).abs().max()
        assert (apart > 1e-3) == (step == 1)  # equal at the start, apart after an update, equal again when refreshed
        learner.update(spec.algorithm.advantages(annotated), step)


def corrected(scale=1, **settings):
    """Weights of two rows: log-ratios 1, -1 and 0.5 times `scale` (learner minus engine), in 2 and 1 of 3 columns."""
    batch = make_batch().rows(torch.tensor([0, 1]))
    mask = torch.tensor([[True, True, False], [True, False, False]])
    batch = batch.replace(
        completion_mask_BT=mask, sampler_logprobs_BT=torch.full((2, 3), -0.25),
        old_logprobs_BT=scale * torch.tensor([[1.0, -1.0, 9.0], [0.5, 9.0, 9.0]]) - 0.25, advantages_BT=mask.float(),
    )  # fmt: skip
    weighed, metrics = correct_mismatch(batch, Mismatch(**settings))
    return weighed.advantages_BT[mask].tolist(), metrics


def test_importance_weights_are_what_they_are_up_to_exp_20_and_cut_at_the_bound_or_masked_outside_it():
    for scale, bound in ((5, 1e9), (40, 1e12)):
        weights, _ = corrected(scale, correction="truncated", bound=bound)
        expected = [math.exp(min(scale * ratio, 20)) for ratio in (1, max(-1, -20 / scale), 0.5)]
        assert weights == pytest.approx(expected, rel=1e-5)
    # e = 2.71828 and 1/e = 0.36788 are outside [1/2, 2], exp(0.5) = 1.64872 is inside
    weights, metrics = corrected(correction="truncated", bound=2)
    assert weights == pytest.approx([2, 0.367879, 1.648721], abs=1e-6)
    assert metrics["mismatch/outside"] == pytest.approx(1 / 3)
    assert metrics["mismatch/weight"] == pytest.approx((2 + 0.367879 + 1.648721) / 3, abs=1e-6)
    weights, metrics = corrected(correction="masked", bound=2)
    assert weights == pytest.approx([0, 0, 1.648721], abs=1e-6)
    assert metrics["mismatch/outside"] == pytest.approx(2 / 3)


def test_the_weight_of_a_completion_is_the_product_over_its_tokens():
    weights, metrics = corrected(correction="truncated", level="sequence", bound=2)
    assert weights == pytest.approx([1, 1, 1.648721], abs=1e-6)  # e * 1/e = 1 for the first
    assert metrics["mismatch/outside"] == 0
    # 1.65 is outside [1/1.5, 1.5]: one of the three tokens of completions, though its row has three columns
    for correction, cut in (("truncated", 1.5), ("masked", 0)):
        weights, metrics = corrected(correction=correction, level="sequence", bound=1.5)
        assert weights == pytest.approx([1, 1, cut], abs=1e-6)
        assert metrics["mismatch/outside"] == pytest.approx(1 / 3)
        assert metrics["mismatch/weight"] == pytest.approx((2 + cut) / 3, abs=1e-6)
    # turned around, 1/1.65 = 0.61 is below 1/1.5
    weights, metrics = corrected(-1, correction="masked", level="sequence", bound=1.5)
    assert weights == pytest.approx([1, 1, 0]) and metrics["mismatch/outside"] == pytest.approx(1 / 3)
