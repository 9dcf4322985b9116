"""A learner with compiled layers is the learner without: scores, gradients, weights, names; and compiles few times.

`torch.compile` traces here and hands on what it traced (backend `eager`): its own kernels take half a minute, long.
"""

import logging
from copy import deepcopy

import pytest
import torch
from cohort.harness.checks.memory import estimate_run
from cohort.harness.checks.preflight import check_runs
from cohort.harness.data import InvalidRun, Prompt, Sampling
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.policy import compiled
from cohort.harness.policy.lora import add_adapter
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run.agreement import check_agreement
from cohort.harness.run.learner import Learner
from cohort.harness.spec.run import parse_run
from fakes import tiny_codec
from pretend_cuda import pretend_cuda
from test_agreement import PROMPTS, make_run
from test_learner import make_batch
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def traced_only(monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    torch.compiler.reset()
    counters.clear()
    logging.getLogger("torch.__trace").handlers.clear()  # it tells the root's, which pytest has, all that is traced


def spec_of(name="grpo", **changes):
    raw = {"task": "arithmetic", "algorithm": {"name": name, "group_size": 2}, "rollouts_per_step": 8,
           "optimizer": {"tokens_per_microbatch": 40}, "device": "cpu"}  # fmt: skip
    return parse_run({**raw, **changes}, "test")


def learner_of(spec):
    policy = tiny_model(0)
    if spec.lora is not None:
        add_adapter(policy, spec.lora, 0)
    if spec.gradient_checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Learner(spec, policy)


def updated(learner, batch, step=0):
    batch = learner.annotate(batch, sampler_is_exact=False)
    return learner.update(learner.algorithm.advantages(batch), step)


def batch_of(seed):
    """The rows of `make_batch` with other tokens, fewer columns and, at times, fewer groups."""
    batch = make_batch(extra_columns=seed)
    tokens = torch.where(batch.tokens_BT > 0, (batch.tokens_BT + 7 * seed) % 90 + 3, 0)
    return batch.replace(tokens_BT=tokens).rows(torch.arange(8 - 2 * (seed % 2)))


def graphs():
    return counters["stats"]["unique_graphs"]


CASES = {
    "ppo": ("ppo", {}),
    "reference": ("grpo", {"algorithm": {"name": "grpo", "group_size": 2, "kl_beta": 0.1}}),
    "one_row": ("grpo", {"optimizer": {"tokens_per_microbatch": 1}}),
    "autocast": ("grpo", {"autocast": True}),
    "autocast_lora": ("ppo", {"lora": {"rank": 2}, "autocast": True}),
    "all": ("ppo", {"lora": {"rank": 2}, "gradient_checkpointing": True}),
}


def check_same_learner(case, bound):
    """Two updates of both kinds of learner, and a third after each has taken the other's state."""
    algorithm, changes = case
    specs = [spec_of(algorithm, **changes, torch_compile=compiles) for compiles in (False, True)]
    plain, fast = learners = [learner_of(spec) for spec in specs]
    for step in range(2):
        metrics = [updated(learner, batch_of(step), step) for learner in learners]
        assert metrics[0] == pytest.approx(metrics[1], abs=bound, rel=bound)
    seen = graphs()
    assert 0 < seen <= 8
    assert plain.policy.state_dict().keys() == fast.policy.state_dict().keys()
    assert plain.state().keys() == fast.state().keys()
    swapped = [learner_of(spec) for spec in specs]
    for other, learner in zip(learners, reversed(swapped), strict=True):
        learner.load_state(deepcopy(other.policy.state_dict()), deepcopy(other.state()))
    metrics = [updated(learner, batch_of(2), 2) for learner in (*learners, *swapped)]
    assert graphs() == seen  # neither lengths nor numbers of rows nor another model of the class compile again
    for found in metrics[1:]:
        assert found == pytest.approx(metrics[0], abs=bound, rel=bound)
    for name, weight in plain.policy.state_dict().items():
        for learner in (fast, *swapped):
            assert float((learner.policy.state_dict()[name] - weight).abs().max()) <= bound, name


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "all" else pytest.mark.long) for n in CASES])
def test_a_compiled_learner_scores_learns_and_resumes_as_any_other(name):
    check_same_learner(CASES[name], 1e-2 if name.startswith("autocast") else 2e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["reference", "all"])
def test_kernels_of_a_compiled_learner_score_and_learn_as_any_other(name, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    check_same_learner(CASES[name], 5e-5)


def test_sampling_compiles_nothing():
    learner = learner_of(spec_of(torch_compile=True))
    engine = TransformersEngine(TransformersEngine.Settings(), learner.policy, tiny_codec())
    for length in (2, 5):
        prompts = [Prompt("a", "1+2="[:length], "3"), Prompt("b", "4-", "")]
        with torch.autocast("cpu", dtype=torch.bfloat16):  # without it small models have an arithmetic of their own
            engine.generate(prompts, 2, Sampling(max_tokens=length), seed=0, step=0)
    assert graphs() == 0


def test_compiled_layers_that_compute_something_else_end_the_run(monkeypatch):
    def wrong(graph, _):
        return lambda *inputs: tuple(x * 1.01 for x in graph(*inputs))

    monkeypatch.setattr(compiled, "BACKEND", wrong)
    with pytest.raises(InvalidRun, match="the learner and the model's own forward pass differ by"):
        check_agreement(make_run(torch_compile=True), PROMPTS, 0)


def test_a_run_with_compiled_layers_starts_without_shared_prompts(caplog):
    run = make_run(torch_compile=True)
    (difference,) = check_agreement(run, PROMPTS, 0).values()
    assert difference < 1e-4 and graphs() > 0
    assert not run.learner.shares_prompts
    assert "do not share their prompt" not in caplog.text  # nothing was given up


def test_what_torch_compile_needs_is_asked_for_before_a_model_loads(monkeypatch, tmp_path):
    spec = spec_of(torch_compile=True)
    check_runs([spec], tmp_path)
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    with pretend_cuda(), pytest.raises(ValueError, match="must be false without the package triton, got true"):
        check_runs([spec.model_copy(update={"device": "cuda"})], tmp_path)
    monkeypatch.setattr(compiled.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"without the headers of Python \(python3-dev\), got true"):
        check_runs([spec], tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"without the compiler no-such-compiler .* install it or remove"):
        check_runs([spec], tmp_path)
    check_runs([spec_of()], tmp_path)


def test_runs_from_before_the_setting_keep_their_digest_and_compiled_ones_have_another():
    plain, fast = spec_of(), spec_of(torch_compile=True)
    assert "torch_compile" not in plain.model_dump(mode="json")
    assert plain.digest() != fast.digest()


def test_memory_is_that_of_rows_read_whole():
    many = {"rollouts_per_step": 64, "optimizer": {"tokens_per_microbatch": 64}}  # 32 prompts, few rows at once
    shared, whole = (estimate_run(spec_of(**many, torch_compile=compiles))[0] for compiles in (False, True))
    assert shared is not None and whole is not None
    assert whole["activations"] < shared["activations"]
