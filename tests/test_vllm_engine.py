"""The vLLM engine against the learner's own log-probs and the transformers engine; needs vllm (`make test-vllm`)."""

import json
import os
import random
import subprocess
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from chats import qwen_run
from cohort.harness.data import InvalidRun, Prompt, Sampling
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.engines.vllm import VLLMEngine, request_seed
from cohort.harness.policy.forward import token_logprobs
from cohort.harness.policy.lora import add_adapter
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.record.events import read_events
from cohort.harness.run.guards.sync import check_sync, spot_check
from cohort.harness.run.loop import train
from cohort.harness.settings.run import LoRA, parse_run
from fakes import MemoryLog, changed, tiny_codec
from ranks_at_work import RUN

PROMPTS = [Prompt(f"p{i}", text, "0") for i, text in enumerate(["1+2=", "1+2+3+4=", "9-", "7+7=", "8-3+2="])]

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


def start(policy, **settings):
    return VLLMEngine(VLLMEngine.Settings(**settings), policy, tiny_codec())


@pytest.fixture
def engine():
    """An engine with the weights of tiny_model(0); the same one as long as no test started another."""
    running = _running()
    if running.closed:
        _running.cache_clear()
        running = _running()
    running.load_weights(tiny_model(0).state_dict(), 0)
    return running


@cache
def _running():
    return start(tiny_model(0))


def rows_of(groups):
    return [(g.prompt_token_ids + r.token_ids, len(g.prompt_token_ids)) for g in groups for r in g.rollouts]


def sampled_logprobs(groups):
    return [value for g in groups for r in g.rollouts for value in r.logprobs]


def learner_logprobs(policy, rows, temperature=1.0):
    values = []
    for ids, n in rows:
        mask = torch.arange(len(ids))[None] >= n
        with torch.no_grad():
            values += token_logprobs(policy, torch.tensor([ids]), mask, temperature)[0][0, n:].tolist()
    return values


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
def test_without_vllm_the_error_says_what_to_install():
    with pytest.raises(ValueError, match=r"pip install 'cohort-rl\[vllm\]'.*engine=transformers"):
        VLLMEngine.Settings().check_machine()


def test_sampling_whose_logprobs_vllm_can_state_is_accepted_and_other_is_refused_with_a_fix():
    for sampling in ({}, {"temperature": 0, "top_p": 0.5}, {"temperature": 2}, {"temperature": 0.01}):
        VLLMEngine.Settings().check(Sampling(**sampling))
    for sampling in ({"top_p": 0.9}, {"temperature": 2.1}, {"temperature": 0.005}):
        with pytest.raises(ValueError, match="engine=transformers"):
            VLLMEngine.Settings().check(Sampling(**sampling))


def test_every_part_of_the_key_changes_a_requests_seed():
    base = [(0, 0, "a", 0), (1, 0, "a", 0), (0, 1, "a", 0), (0, 0, "b", 0), (0, 0, "a", 1)]
    alike = [(0, 0, "1/a", 0), (0, 1, "a", 10), (0, 11, "a", 0), (0, 1, "0/a", 1)]
    seeds = [request_seed(*key) for key in base + alike]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


@needs_vllm
@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 1.5}, {"temperature": 0.0, "top_p": 0.5}]
)
def test_logprobs_are_the_learners_at_the_sampling_temperature_before_any_cut(engine, sampling):
    sampling = Sampling(max_tokens=12, **sampling)
    groups = engine.generate(PROMPTS, 3, sampling, seed=1, step=2)
    expected = learner_logprobs(tiny_model(0), rows_of(groups), sampling.temperature)
    assert sampled_logprobs(groups) == pytest.approx(expected, abs=1e-5)


@needs_vllm
def test_greedy_completions_are_those_of_the_transformers_engine(engine):
    other = TransformersEngine(TransformersEngine.Settings(), tiny_model(0), tiny_codec())
    sampling = Sampling(max_tokens=16, temperature=0)
    ours, theirs = (e.generate(PROMPTS, 1, sampling, seed=0, step=0) for e in (engine, other))
    for a, b in zip(ours, theirs, strict=True):
        assert a.prompt_token_ids == b.prompt_token_ids
        assert [(r.token_ids, r.text, r.finish_reason) for r in a.rollouts] == [
            (r.token_ids, r.text, r.finish_reason) for r in b.rollouts
        ]


@needs_vllm
def test_scores_are_the_learners_logprobs_whatever_prefixes_are_cached(engine):
    rows = rows_of(engine.generate(PROMPTS, 2, Sampling(max_tokens=40), seed=0, step=0))
    shared = tuple(range(3, 98)) * 3  # longer than two blocks of 128 tokens, which are what vLLM caches on a CPU
    rows += [(shared, 1), (shared, 280), ((*shared, 20, 21), 200)]
    expected = learner_logprobs(tiny_model(0), rows)
    for _ in range(2):
        assert [value for row in engine.score(rows) for value in row] == pytest.approx(expected, abs=2e-5)


@needs_vllm
def test_prompts_longer_than_a_cache_block_are_sampled_from_new_weights_after_a_sync(engine):
    prompts = [Prompt("long", "1+2+3+4+5+6+7+8+9-" * 16, "0")]  # 288 tokens: two full blocks stay cached
    engine.generate(prompts, 4, Sampling(max_tokens=8), seed=0, step=0)
    engine.load_weights(tiny_model(1).state_dict(), 1)
    groups = engine.generate(prompts, 4, Sampling(max_tokens=8), seed=0, step=0)
    assert sampled_logprobs(groups) == pytest.approx(learner_logprobs(tiny_model(1), rows_of(groups)), abs=1e-5)


@needs_vllm
def test_a_bfloat16_engine_rounds_float32_weights_and_the_spot_check_notices_a_missed_sync_of_them():
    policy, newer = tiny_model(0), changed(tiny_model(0), lambda weights: weights + 1e-5 * weights.sign())  # 5e-4 nats
    engine = start(policy, dtype="bfloat16")
    groups = engine.generate(PROMPTS, 2, Sampling(max_tokens=12), seed=0, step=0)
    expected = learner_logprobs(tiny_model(0).to(torch.bfloat16), rows_of(groups))
    assert sampled_logprobs(groups) == pytest.approx(expected, abs=0.1)
    assert sampled_logprobs(groups) != pytest.approx(learner_logprobs(policy, rows_of(groups)), abs=1e-4)
    before = spot_check(engine, policy, groups)
    engine.load_weights(policy.state_dict(), 1)
    engine.verifies_weights = False  # as where vLLM packs bfloat16 weights for the processor, so that scores decide
    with pytest.raises(InvalidRun, match="stale weights: the update moved"):
        check_sync(engine, newer, before)
    engine.load_weights(newer.state_dict(), 1)
    assert check_sync(engine, newer, before) < 0.1


@needs_vllm
def test_two_starts_of_one_shape_have_one_key_in_vllms_cache_of_compiled_graphs():
    keys = [start(tiny_model(seed)).llm.llm_engine.vllm_config.compute_hash() for seed in (0, 1)]
    assert keys[0] == keys[1]


@needs_vllm
def test_the_spot_check_passes_a_sync_and_notices_a_missing_one_and_a_partial_one(engine):
    policy, newer = tiny_model(0), changed(tiny_model(0), lambda weights: weights + 1e-3 * weights.sign())
    groups = engine.generate(PROMPTS, 2, Sampling(max_tokens=12), seed=0, step=0)
    before = spot_check(engine, policy, groups)
    with pytest.raises(InvalidRun, match="stale weights"):
        check_sync(engine, newer, before)
    # Without the second name of the tied weights vLLM 0.32 keeps the old language-model head.
    engine.load_weights({k: v for k, v in newer.state_dict().items() if k != "lm_head.weight"}, 1)
    with pytest.raises(InvalidRun, match="stale weights"):
        check_sync(engine, newer, before)
    engine.load_weights(newer.state_dict(), 1)
    assert check_sync(engine, newer, before) < 1e-5


@needs_vllm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LoRA(rank=4, alpha=6.0)])
def test_one_stale_tensor_of_vllms_own_is_found_whichever_it_is(monkeypatch, dtype, lora):
    # As on a GPU, weights stay: a CPU repacks them for oneDNN, and small ones in bfloat16 for AMX.
    monkeypatch.setattr(import_module("vllm._custom_ops"), "_supports_onednn", False)
    monkeypatch.setattr(import_module("vllm.model_executor.layers.utils"), "check_cpu_sgl_kernel", lambda *_: False)
    policy, steps = tiny_model(0), iter(range(100))
    if lora is not None:
        add_adapter(policy, lora, 0)
    engine = start(policy, dtype=dtype)
    assert engine.verifies_weights

    def tensors(worker):
        model = worker.get_model()
        if lora is None:
            return [parameter.data for parameter in model.parameters()]
        layers = [m for m in model.modules() if hasattr(m, "lora_a_stacked")]
        return [x for m in layers for x in (*m.lora_a_stacked, *m.lora_b_stacked)]

    def load():
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.01)
        engine.load_weights(policy.state_dict(), next(steps))

    llm, held = engine.llm, engine.llm.collective_rpc(tensors)[0]
    rpc = llm.collective_rpc
    for stale, before in enumerate([value.clone() for value in held]):

        def after(method, *args, stale=stale, before=before, **more):
            if callable(method):  # the weights are in, and their checksums are asked for
                rpc(tensors)[0][stale].copy_(before)
            return rpc(method, *args, **more)

        monkeypatch.setattr(llm, "collective_rpc", after)
        with pytest.raises(InvalidRun, match="stale weights: after a load, the weights of"):
            load()
        monkeypatch.setattr(llm, "collective_rpc", rpc)
        load()


@needs_vllm
def test_a_completion_that_the_model_has_no_room_for_is_refused():
    engine = start(tiny_model(0), max_model_len=32)
    longest = len(tiny_codec().encode("1+2+3+4="))
    engine.generate(PROMPTS, 1, Sampling(max_tokens=31 - longest), seed=0, step=0)
    with pytest.raises(ValueError, match=r"engine.max_model_len must exceed .* \(8 \+ 24\), got 32"):
        engine.generate(PROMPTS, 1, Sampling(max_tokens=32 - longest), seed=0, step=0)


@needs_vllm
def test_process_wide_state_is_left_as_it_was(monkeypatch):
    def state():
        numpy = np.random.get_state()
        return [random.getstate(), numpy[1].tolist(), numpy[2], torch.random.get_rng_state().tolist(),
                dict(os.environ), torch.get_num_threads(), torch.set_num_threads]  # fmt: skip

    for name in list(os.environ):  # what an engine of another test would have left behind
        if name == "LD_PRELOAD" or name.startswith("VLLM_"):
            monkeypatch.delenv(name)
    torch.manual_seed(5)
    policy = tiny_model(0)
    before = state()
    engine = start(policy)
    engine.generate(PROMPTS, 2, Sampling(max_tokens=4), seed=0, step=0)
    engine.load_weights(policy.state_dict(), 1)
    engine.sleep()
    engine.close()
    assert state() == before


@needs_vllm
def test_a_new_engine_takes_the_place_of_the_last_one():
    first = start(tiny_model(0))
    second = start(tiny_model(1))
    with pytest.raises(AssertionError, match="newer"):
        first.generate(PROMPTS, 1, Sampling(max_tokens=4), seed=0, step=0)
    del first
    groups = second.generate(PROMPTS, 1, Sampling(max_tokens=4), seed=0, step=0)
    assert sampled_logprobs(groups) == pytest.approx(learner_logprobs(tiny_model(1), rows_of(groups)), abs=1e-5)


@needs_vllm
def test_a_bfloat16_engine_trains_a_model_of_the_shape_of_qwen_beside_a_float32_learner(tmp_path):
    spec, log = qwen_run(tmp_path / "model", name="vllm", dtype="bfloat16"), MemoryLog()
    result = train(spec, tmp_path / "run", log, cache=tmp_path)
    assert result.state == "complete", result.reason
    divergences = [value for _, value in log.history("mismatch/kl")]
    assert len(divergences) == 3
    assert all(0 < value < 0.01 for value in divergences)


def trained(raw, folder):
    """What a complete run logs that the command starts, in a group of processes if it has several devices."""
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(json.dumps(raw))
    command = [sys.executable, "-m", "cohort", "train", "run.yaml", "--runs", ".", "--name", "run"]
    subprocess.run(command, check=True, cwd=folder)
    log, events = MemoryLog(), read_events(folder / "train/run/events.jsonl")
    log.events = [(event["step"], event["values"]) for event in events if event["type"] == "metrics"]
    return log


@needs_vllm
@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 2}}], ids=str)
def test_each_of_two_devices_samples_with_a_vllm_of_its_own_that_gets_the_whole_weights(tmp_path, changes):
    raw = {**RUN, "devices": 2, "optimizer": {"learning_rate": 1e-3}, "sampling": {"max_tokens": 32}, **changes,
           "engine": {"name": "vllm", "max_model_len": 128}}  # fmt: skip
    log = trained(raw, tmp_path)
    assert max(value for _, value in log.history("policy/weights_changed")) > 0.5
    for name in ("mismatch/after_sync", "mismatch/kl"):
        assert max(value for _, value in log.history(name)) < 1e-4


@needs_vllm
@pytest.mark.timeout(300)
def test_two_devices_that_share_one_vllm_sample_log_and_learn_what_one_alone_does(tmp_path):
    engine = {"name": "vllm", "max_model_len": 128}
    raw = {**RUN, "algorithm": {"name": "remax"}, "optimizer": {"learning_rate": 1e-3}}
    alone, spec = MemoryLog(), parse_run({**raw, "engine": engine}, where="alone")
    assert train(spec, tmp_path / "1", alone, cache=tmp_path / "cache").state == "complete"
    both = trained({**raw, "devices": 2, "engine": {**engine, "tensor_parallel_size": 2}}, tmp_path)
    assert [step for step, _ in alone.events] == [step for step, _ in both.events]
    apart = ("flops/", "mismatch/", "system/")
    for (step, values), (_, others) in zip(alone.without_clocks(), both.without_clocks(), strict=True):
        for name in [name for name in values | others if not name.startswith(apart)]:
            assert others[name] == pytest.approx(values[name], abs=1e-4, rel=1e-4, nan_ok=True), (step, name)
    for name in ("mismatch/after_sync", "mismatch/kl"):
        assert max(value for _, value in both.history(name)) < 1e-4
