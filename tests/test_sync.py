"""Stale weights are noticed: engines that hold the learner's weights, the last step's, or all but one tensor."""

import contextlib
import copy

import pytest
import torch
from architectures import small_run
from cohort.harness.data import InvalidRun, Prompt, Sampling
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.policy.forward import token_logprobs
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run.guards import sync
from cohort.harness.run.guards.sync import check_sync, spot_check
from cohort.harness.run.step import train_step
from fakes import changed, tiny_codec

PROMPTS = [Prompt(f"p{i}", text, "0") for i, text in enumerate(["1+2=", "1+2+3+4=", "9-", "7+7=", "8-3+2="])]


class EngineWithACopy(TransformersEngine):
    """Samples from weights of its own, which it takes over only where `takes` says so."""

    def __init__(self, policy, takes=lambda name: True, rounding=0.0, precision=None):
        super().__init__(TransformersEngine.Settings(), copy.deepcopy(policy), tiny_codec())
        self.takes, self.rounding, self.precision = takes, rounding, precision

    def load_weights(self, weights, version):
        super().load_weights({name: value for name, value in weights.items() if self.takes(name)}, version)

    def score(self, rows):
        result = []
        for ids, n in rows:
            tokens = torch.tensor([ids])
            mask = torch.arange(len(ids))[None] >= n
            with torch.no_grad():
                result.append((token_logprobs(self.policy, tokens, mask, 1.0)[0][0, n:] + self.rounding).tolist())
        return result


def sampled(engine):
    return engine.generate(PROMPTS, 2, Sampling(max_tokens=12), seed=0, step=0)


def update(policy, size):
    """One optimiser step of about `size` per weight, as AdamW's first is."""
    with torch.no_grad():
        for i, parameter in enumerate(policy.parameters()):
            signs = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(i)).sub(0.5).sign()
            parameter.add_(size * signs.to(parameter.dtype))


def update_and_check(engine, policy, size=1e-4, times=1):
    """An update of `size` per weight, the sync and the check, so many times; what the last check found."""
    groups, before, found = sampled(engine), None, None
    for _ in range(times):
        before = spot_check(engine, policy, groups, before)
        update(policy, size)
        engine.load_weights(policy.state_dict(), 1)
        found = check_sync(engine, policy, before)
    return found


STALE = {"takes": lambda name: False}
ALL_BUT_ONE = {"takes": lambda name: "layers.1.mlp.up_proj" not in name}
LOOSE = {"precision": "bfloat16"}  # with a bound of 1 nat


@pytest.mark.parametrize(
    ("dtype", "engine", "size", "most"),
    [("float32", {}, 1e-4, 1e-4), ("float32", LOOSE, 1e-3, 1e-4),
     ("bfloat16", {"rounding": 0.2}, 2e-3, 0.3),  # the bound allows for its rounding
     ("float32", STALE, 0.0, 1e-5), ("float32", STALE, 1e-7, 1e-4)],  # no update to miss
)  # fmt: skip
def test_an_engine_with_the_learners_weights_passes(dtype, engine, size, most):
    policy = tiny_model(0).to(getattr(torch, dtype))
    assert update_and_check(EngineWithACopy(policy, **engine), policy, size) < most


@pytest.mark.parametrize(
    ("dtype", "engine", "size", "words"),
    [("float32", STALE, 1e-3, "stale weights: .* differ by"),
     ("float32", {**STALE, **LOOSE}, 1e-3, "stale weights: the update moved"),
     ("bfloat16", STALE, 2e-3, "stale weights: the update moved"),
     ("float32", ALL_BUT_ONE, 1e-2, "stale weights"),
     ("float32", {"rounding": float("nan")}, 1e-4, "differ by nan")],
)  # fmt: skip
def test_stale_weights_and_scores_that_are_no_numbers_make_the_run_invalid(dtype, engine, size, words):
    policy = tiny_model(0).to(getattr(torch, dtype))
    with pytest.raises(InvalidRun, match=words):
        update_and_check(EngineWithACopy(policy, **engine), policy, size)


def test_a_step_whose_engine_keeps_its_old_weights_makes_the_run_invalid():
    algorithm = {"name": "grpo", "group_size": 4}
    for engine in ({}, STALE):
        run = small_run(tiny_model(0), algorithm=algorithm, rollouts_per_step=8, control="random")  # paid by coins
        run.engine = EngineWithACopy(run.learner.policy, **engine)
        run.engine.exact_logprobs = run.learner.sampler_is_exact = False
        prompts = run.spec.task.prompts("train")
        if not engine:
            assert train_step(run, prompts, 0)[0]["mismatch/after_sync"] < 1e-4
            continue
        with pytest.raises(InvalidRun, match="stale weights: after they were loaded"):
            train_step(run, prompts, 0)


def test_rows_are_the_prompt_and_the_first_tokens_of_completions_of_different_groups(monkeypatch):
    monkeypatch.setattr(sync, "NUM_ROWS", 2)
    monkeypatch.setattr(sync, "MAX_TOKENS", 3)
    policy = tiny_model(0)
    engine = EngineWithACopy(policy)
    groups = sampled(engine)
    found = spot_check(engine, policy, groups)
    assert len(spot_check(engine, policy, groups[:1]).rows) == 1  # no more than there are groups
    shares = TransformersEngine(TransformersEngine.Settings(), policy, tiny_codec())
    assert spot_check(shares, policy, groups) is None  # its weights are the learner's
    first, third = (tiny_codec().encode(PROMPTS[i].text) for i in (0, 2))  # i * 5 // 2
    assert found.rows == (
        (first + groups[0].rollouts[0].token_ids[:3], len(first)),
        (third + groups[2].rollouts[0].token_ids[:3], len(third)),
    )
    assert found.learner == pytest.approx([*groups[0].rollouts[0].logprobs[:3], *groups[2].rollouts[0].logprobs[:3]])


def planted(precision, size, times=1, missed=True):
    """Updates beside an engine of its own precision."""
    policy = tiny_model(0)
    engine = EngineWithACopy(policy, takes=lambda name: not missed, precision=precision)
    engine.policy.to(getattr(torch, precision))
    update_and_check(engine, policy, size, times)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1e-4, 1e-6])
def test_a_missed_sync_is_noticed_beside_a_float32_learner_and_one_in_step_is_not(precision, size):
    size *= 20  # without a gradient the signs are random, and move a token some 20 times less
    with pytest.raises(InvalidRun, match="stale weights"):
        planted(precision, size)
    planted(precision, size, missed=False)


@pytest.mark.slow
def test_an_update_below_notice_is_noticed_when_several_have_been_missed():
    planted("bfloat16", 1e-7)
    with pytest.raises(InvalidRun, match="stale weights: the update moved"):
        planted("bfloat16", 1e-7, times=20)
    planted("bfloat16", 1e-7, times=20, missed=False)


def test_a_spot_check_goes_on_until_the_learner_has_moved_far_enough_and_keeps_the_runs_usual_difference():
    policy = tiny_model(0)
    engine = EngineWithACopy(policy, rounding=0.05)
    groups = sampled(engine)
    first = spot_check(engine, policy, groups)
    assert spot_check(engine, policy, groups, first) is first
    changed(policy, lambda weights: weights + 1e-3)
    second = spot_check(engine, policy, groups, first)
    assert second is not first
    assert second.usual == first.usual == pytest.approx(0.05, abs=1e-5)


def test_the_bound_is_relative_to_the_difference_before_the_runs_first_update():
    policy = tiny_model(0)
    engine = EngineWithACopy(policy, rounding=0.01)  # ten times what float32 allows
    before = spot_check(engine, policy, sampled(engine))
    update(policy, 1e-4)
    engine.load_weights(policy.state_dict(), 1)
    assert 0.005 < check_sync(engine, policy, before) < 0.02
    engine.rounding = 0.12
    with pytest.raises(InvalidRun, match=r"differ by 0.12 nats .* \(at most 0.1"):
        check_sync(engine, policy, before)


def test_the_learner_is_scored_without_tf32_whatever_the_run_uses():
    matmul, policy, seen = torch.backends.cuda.matmul, tiny_model(0), []
    policy.register_forward_pre_hook(lambda *_: seen.append(matmul.fp32_precision))
    engine = EngineWithACopy(policy)
    groups = engine.generate(PROMPTS, 1, Sampling(max_tokens=4), seed=0, step=0)
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        spot_check(engine, policy, groups)
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
    assert seen[-1] == "ieee"


class LaggingEngine(EngineWithACopy):
    """Its scores move `share` of the way that its weights do."""

    share, since = 1.0, None

    def score(self, rows):
        now = super().score(rows)
        self.since = self.since or now
        return [
            [b + self.share * (a - b) for a, b in zip(*both, strict=True)] for both in zip(now, self.since, strict=True)
        ]


@pytest.mark.parametrize(("share", "is_stale"), [(0.05, True), (0.2, False)])  # a tenth of the way is asked for
def test_an_engine_that_hardly_moves_with_the_learner_is_stale(share, is_stale):
    policy = tiny_model(0)
    engine = LaggingEngine(policy, **LOOSE)
    engine.share = share
    with pytest.raises(InvalidRun, match="the update moved") if is_stale else contextlib.nullcontext():
        update_and_check(engine, policy, 1e-3)
