"""Rates, KL weight and reference over a run, and importance weights against a sampler with other probabilities."""

import math

import pytest
import torch
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run import schedules
from cohort.harness.run.learner import Learner, correct_mismatch
from cohort.harness.run.loop import train
from cohort.harness.run.schedules import adapted_kl_beta, kl_beta_factor, learning_rate_factor
from cohort.harness.spec.errors import SpecError
from cohort.harness.spec.run import KLControl, Mismatch, Optimizer, parse_run
from fakes import MemoryLog
from test_learner import make_batch
from test_train import BASE, StopAfter, assert_same_weights, final_weights


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cold-starts")


def factors(steps, **settings):
    return [learning_rate_factor(Optimizer(**settings), step, steps) for step in range(steps)]


def test_the_learning_rate_rises_over_the_warm_up_and_falls_to_zero_after_the_last_step():
    assert factors(3) == [1, 1, 1]
    assert factors(4, warmup_steps=4) == [0.25, 0.5, 0.75, 1]
    assert factors(4, schedule="linear") == [1, 0.75, 0.5, 0.25]
    assert factors(6, schedule="linear", warmup_steps=2) == [0.5, 1, 1, 0.75, 0.5, 0.25]
    # (1 + cos(pi * t / 4)) / 2 for t = 0 .. 3
    assert factors(4, schedule="cosine") == pytest.approx([1, 0.853553, 0.5, 0.146447], abs=1e-6)


def test_the_cosine_kl_weight_is_held_falls_and_stays():
    settings = KLControl(schedule="cosine")
    found = [kl_beta_factor(settings, step, 20) for step in (0, 2, 9, 16, 19)]
    # step 9 is halfway between 10 % and 80 %
    assert found == pytest.approx([1, 1, 0.5, 0, 0], abs=1e-9)
    assert kl_beta_factor(KLControl(), 7, 20) == 1


def test_the_adaptive_kl_weight_moves_by_a_tenth_of_the_relative_error_cut_to_a_fifth():
    settings = KLControl(schedule="adaptive", target=0.1)
    assert adapted_kl_beta(settings, 0.5, 0.11) == pytest.approx(0.5 * 1.01)
    assert adapted_kl_beta(settings, 0.5, 9.0) == pytest.approx(0.5 * 1.02)
    assert adapted_kl_beta(settings, 0.5, 0.0) == pytest.approx(0.5 * 0.98)


def run(**changes):
    algorithm = {"name": "grpo", "group_size": 4, "kl_beta": 0.1}
    return parse_run({**BASE, "algorithm": algorithm, **changes}, "test")


def test_scheduled_settings_are_used_and_logged(tmp_path, cache):
    log = MemoryLog()
    spec = run(
        optimizer={"schedule": "linear", "warmup_steps": 1, "learning_rate": 1e-3},
        kl={"schedule": "cosine"},
    )
    assert train(spec, tmp_path, log, cache=cache).state == "complete"
    assert [v for _, v in log.history("optimizer/learning_rate")] == pytest.approx([1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4])
    expected = [0.1, *(0.05 * (1 + math.cos(math.pi * part / 7)) for part in (1, 3, 5, 7))]
    assert [v for _, v in log.history("kl/beta")] == pytest.approx(expected)
    plain = MemoryLog()
    train(run(optimizer={"learning_rate": 1e-3}), tmp_path / "plain", plain, cache=cache)
    assert not plain.history("kl/beta") + plain.history("optimizer/learning_rate")
    assert plain.history("kl/reference") != log.history("kl/reference")


def test_the_critics_rate_follows_the_policys_schedule():
    rates = {"learning_rate": 1e-3, "critic_learning_rate": 5e-2, "schedule": "linear", "warmup_steps": 2}
    learner = Learner(run(algorithm="ppo", optimizer=rates, steps=6), tiny_model(0))
    assert learner.critic is not None
    used = []
    for step in range(6):
        learner.begin_step(step)
        used.append([learner.optimizers[name].param_groups[0]["lr"] for name in ("policy", "critic")])
    factor = [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert used == [[pytest.approx(f * 1e-3), pytest.approx(f * 5e-2)] for f in factor]


@pytest.mark.parametrize(
    "kl",
    [{"schedule": "adaptive", "target": 1e-4}, {"refresh_reference_every": 2},
     pytest.param({"schedule": "cosine"}, marks=pytest.mark.long)],
)  # fmt: skip
def test_a_stopped_run_resumes_bit_for_bit_with_what_has_changed(kl, tmp_path, cache):
    spec = run(kl=kl, optimizer={"learning_rate": 1e-3, "schedule": "cosine"})
    whole, parts = MemoryLog(), MemoryLog()
    train(spec, tmp_path / "whole", whole, cache=cache)
    train(spec, tmp_path / "parts", parts, cache=cache, should_stop=StopAfter(3))
    assert train(spec, tmp_path / "parts", parts, cache=cache).state == "complete"
    assert parts.without_clocks() == whole.without_clocks()
    assert_same_weights(final_weights(tmp_path / "parts"), final_weights(tmp_path / "whole"))
    if kl.get("schedule") == "adaptive":
        betas = [value for _, value in whole.history("kl/beta")]
        divergences = [value for _, value in whole.history("kl/reference")]
        for before, divergence, after in zip(betas, divergences, betas[1:], strict=False):
            assert after == pytest.approx(adapted_kl_beta(spec.kl, before, divergence))
        assert betas[1] < betas[0] < max(betas[-1], betas[0] + 1e-9)


SHORT = {
    "evaluation": {"every": 4, "num_prompts": 2, "num_test_prompts": 2, "num_samples": 1},
    "checkpoints": {"every": 4, "rollouts_every": 0},
    "rewards": {"reasoning_length": 1.0},
    "rollouts_per_step": 8,
    "steps": 4,
}


@pytest.mark.parametrize("name", ["dapo", "kl_cov", "ppo", "rloo", "remax"])  # KL in loss or reward, sums, a critic
def test_an_algorithm_trains_on_and_resumes_when_its_kl_weight_has_fallen_to_zero(name, tmp_path, cache, monkeypatch):
    monkeypatch.setattr(schedules, "HOLD", 0)
    monkeypatch.setattr(schedules, "END", 0.5)  # of 4 steps the last two have a factor of 0
    spec = run(algorithm={"name": name, "group_size": 4, "kl_beta": 0.1}, kl={"schedule": "cosine"}, **SHORT)
    whole, parts = MemoryLog(), MemoryLog()
    assert train(spec, tmp_path / "whole", whole, cache=cache).state == "complete"
    assert [value for _, value in whole.history("kl/beta")] == pytest.approx([0.1, 0.05, 0, 0], abs=1e-12)
    kinds = [set(values) for step, values in whole.events if step and "policy/loss" in values]
    assert len(kinds) == 4
    assert all("kl/reference" in names and names == kinds[0] for names in kinds)
    assert all(value > 0 for _, value in whole.history("policy/grad_norm"))
    assert train(spec, tmp_path / "parts", parts, cache=cache, should_stop=StopAfter(3)).state == "stopped"
    assert train(spec, tmp_path / "parts", parts, cache=cache).state == "complete"
    assert parts.without_clocks() == whole.without_clocks()


def test_a_schedule_may_not_take_the_kl_weight_where_the_algorithm_learns_nothing():
    with pytest.raises(SpecError, match=r"kl.schedule must not be cosine for online_dpo, whose kl_beta must not fall"):
        run(algorithm="online_dpo", kl={"schedule": "cosine"})


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


def corrected(**settings):
    """Weights of two rows: log-ratios 1, -1 and 0.5 (learner minus engine), the last column outside the first row."""
    batch = make_batch().rows(torch.tensor([0, 1]))
    mask = torch.tensor([[True, True, False], [True, False, False]])
    batch = batch.replace(
        completion_mask_BT=mask,
        sampler_logprobs_BT=torch.zeros(2, 3),
        old_logprobs_BT=torch.tensor([[1.0, -1.0, 9.0], [0.5, 9.0, 9.0]]),
        advantages_BT=mask.float(),
    )
    weighed, metrics = correct_mismatch(batch, Mismatch(**settings))
    assert weighed.advantages_BT is not None
    return weighed.advantages_BT[mask].tolist(), metrics


def test_importance_weights_are_cut_at_the_bound_or_masked_outside_it():
    # e = 2.71828 and 1/e = 0.36788 are outside [1/2, 2], exp(0.5) = 1.64872 is inside
    weights, metrics = corrected(correction="truncated", bound=2)
    assert weights == pytest.approx([2, 0.367879, 1.648721], abs=1e-6)
    assert metrics["mismatch/outside"] == pytest.approx(1 / 3)
    assert metrics["mismatch/weight"] == pytest.approx((2 + 0.367879 + 1.648721) / 3, abs=1e-6)
    weights, metrics = corrected(correction="masked", bound=2)
    assert weights == pytest.approx([0, 0, 1.648721], abs=1e-6)
    assert metrics["mismatch/outside"] == pytest.approx(2 / 3)


def test_the_weight_of_a_completion_is_the_product_over_its_tokens():
    weights, _ = corrected(correction="truncated", level="sequence", bound=2)
    assert weights == pytest.approx([1, 1, 1.648721], abs=1e-6)  # e * 1/e = 1 for the first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl": {"schedule": "adaptive"}}, "kl.target belongs to kl.schedule=adaptive, got None"),
        ({"kl": {"target": 0.1}}, "kl.target belongs to kl.schedule=adaptive, got 0.1 with constant"),
        ({"kl": {"schedule": "cosine"}, "algorithm": {"name": "grpo", "kl_beta": 0}}, "kl.schedule must be constant"),
        ({"kl": {"refresh_reference_every": 5}, "lora": {}}, "kl.refresh_reference_every must be 0 with lora"),
        (
            {"mismatch": {"correction": "masked"}, "algorithm": {"name": "online_dpo"}},
            "mismatch.correction must be none for online_dpo",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        run(**changes)
