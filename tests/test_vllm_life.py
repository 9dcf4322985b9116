"""The life of a vLLM engine on a GPU, with a fake LLM that refuses what vLLM refuses: start, sleep, reload, end."""

import gc
import json
import os
from pathlib import Path
from weakref import ref

import factories
import fake_vllm
import pytest
import torch
from cohort.harness.checks.memory import estimate_run, peak_bytes
from cohort.harness.data import InvalidRun, Prompt, Sampling
from cohort.harness.devices.device import mixed_precision, peak_memory, reset_peak_memory, resident_bytes
from cohort.harness.engines.vllm import VLLMEngine
from cohort.harness.policy.lora import adapter_weights, add_adapter
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run import standalone
from cohort.harness.run.evaluate import evaluate_run
from cohort.harness.run.guards.sync import check_sync, spot_check
from cohort.harness.run.loop import train
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.load import load_study
from cohort.harness.settings.run import LoRA, parse_run
from fakes import MemoryLog, StopAfter, changed, tiny_codec
from pretend_cuda import on_cuda, pretend_cuda
from test_vllm_engine import start

PROMPTS = [Prompt(f"p{i}", text, "0") for i, text in enumerate(["1+2=", "1+2+3+4=", "9-"])]
SAMPLING = Sampling(max_tokens=6)
BFLOAT16 = {"name": "vllm", "dtype": "bfloat16", "sleep": True}


@pytest.fixture
def llm(monkeypatch, tmp_path):
    monkeypatch.setattr(VLLMEngine, "_last", None)
    return fake_vllm.install(monkeypatch, tmp_path / "vllm")


def run_spec(**changes):
    few = {"every": 2, "num_prompts": 3, "num_test_prompts": 3, "num_samples": 1}
    return parse_run({"task": "arithmetic", "algorithm": {"name": "grpo", "group_size": 4}, "evaluation": few,
                      "engine": {"name": "vllm", "sleep": True}, "sampling": {"max_tokens": 4}, "rollouts_per_step": 8,
                      "steps": 2, "device": "cpu", "rewards": {"repetition": {"ngram": 1}}, **changes},
                     "test")  # fmt: skip


def test_the_engine_starts_from_the_config_alone_and_samples_only_after_its_first_reload(llm):
    policy = tiny_model(3)
    engine = start(policy)
    assert engine.llm.calls == ["start", "reload_weights"]
    assert [file.name for file in Path(engine.llm.folder).iterdir()] == ["config.json"]
    assert json.loads((Path(engine.llm.folder) / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    own, given = engine.llm.model.state_dict(), policy.state_dict()
    assert all(torch.equal(own[name], given[name]) for name in given)
    plain = engine.generate(PROMPTS, 1, SAMPLING, seed=0, step=0)
    with mixed_precision(torch.device("cpu"), True):  # which does not reach vLLM
        assert engine.generate(PROMPTS, 1, SAMPLING, seed=0, step=0) == plain
    folder = engine.llm.folder
    assert start(tiny_model(4)).llm.folder == folder  # of one shape, and of another
    policy.config.max_position_embeddings -= 1
    assert start(policy).llm.folder != folder


def test_an_adapter_is_served_as_an_adapter_on_frozen_weights_that_outlive_the_engines_sleep(llm):
    policy = tiny_model(0)
    add_adapter(policy, LoRA(rank=2), seed=0)
    engine = start(policy)
    assert engine.llm.settings["max_lora_rank"] == 8
    frozen = tiny_model(0).state_dict()
    assert all(torch.equal(value, frozen[name]) for name, value in engine.llm.model.state_dict().items())
    with torch.no_grad():
        for parameter in adapter_weights(policy).values():
            parameter.add_(0.1)
    ids = tuple(range(5, 12))
    stale = engine.score([(ids, 3)])
    engine.sleep()
    with pytest.raises(AssertionError, match="no weights before load_weights"):
        engine.score([(ids, 3)])
    engine.load_weights(policy.state_dict(), 1)
    found = engine.score([(ids, 3)])
    with torch.no_grad():
        logprobs = torch.log_softmax(policy(torch.tensor([ids])).logits[0], -1)
    own = [float(logprobs[place - 1, ids[place]]) for place in range(3, 7)]
    assert found == [pytest.approx(own, abs=1e-5)] and stale != found
    begin = ["start", "reload_weights", "adapter", "score"]
    assert engine.llm.calls == [*begin, "sleep", "wake kv_cache weights", "adapter", "score"]


@pytest.mark.parametrize(
    ("policy", "autocast", "dtype", "expected"),
    [("float32", False, None, torch.float32), ("float32", True, None, torch.bfloat16),
     ("bfloat16", False, None, torch.bfloat16), ("float32", True, "float32", torch.float32),
     ("bfloat16", False, "float32", torch.float32), ("float32", False, "bfloat16", torch.bfloat16),
     ("float32", True, "float16", torch.float16)],
)  # fmt: skip
def test_the_engines_precision_is_its_own_setting_or_else_follows_the_runs(llm, policy, autocast, dtype, expected):
    settings = VLLMEngine.Settings(dtype=dtype).for_run(policy, autocast, lambda: 63, 8)
    model = tiny_model(0).to(getattr(torch, policy))
    engine = VLLMEngine(settings, model, tiny_codec())
    assert engine.llm.dtype == expected
    assert engine.llm.settings["max_model_len"] == 64
    given = model.state_dict()
    step = 2**-7 if (policy, expected) == ("float32", torch.bfloat16) else 0  # rounded up or down
    for name, value in engine.llm.model.state_dict().items():
        wanted = given[name] if step else given[name].to(expected)
        assert torch.allclose(value.double(), wanted.double(), rtol=step, atol=0)


@pytest.mark.parametrize(("split", "rows", "expected"), [(1, 0, 256), (1, 300, 300), (2, 300, 600), (1, 9000, 1024)])
def test_vllm_gets_the_size_of_its_cache_for_the_rows_of_a_step_and_asks_for_what_it_takes_alone(
    llm, split, rows, expected
):
    settings = VLLMEngine.Settings(tensor_parallel_size=split).for_run("float32", True, lambda: 127, rows)
    given = VLLMEngine(settings, tiny_model(0), tiny_codec()).llm.settings
    # 2 blocks of 128 tokens, because vLLM keeps one: 3 layers x 2 x 2 heads x 32 wide, in bfloat16
    cache = expected * 256 * 3 * 2 * (2 // split) * 32 * 2
    assert (given["max_num_seqs"], given["kv_cache_memory_bytes"]) == (expected, cache)
    weights, passes = 2 * 166_592 // split, 2**30 + 16 * expected * 100
    assert given["gpu_memory_utilization"] * 80 * 2**30 == pytest.approx(weights + passes + cache, abs=1)
    assert given["enable_sleep_mode"]
    own = settings.model_copy(update={"max_batch_rows": 3, "sleep": False})
    engine = VLLMEngine(own.for_run("float32", True, lambda: 127, rows), tiny_model(0), tiny_codec())
    assert (engine.llm.settings["max_num_seqs"], engine.llm.settings["enable_sleep_mode"]) == (3, False)
    engine.sleep()
    assert "sleep" not in engine.llm.calls
    adapted = tiny_model(0)
    add_adapter(adapted, LoRA(rank=2), seed=0)  # whose matrices are none of vLLM's weights
    again = VLLMEngine(settings, adapted, tiny_codec()).llm.settings
    assert again["gpu_memory_utilization"] == given["gpu_memory_utilization"]


def test_ranks_of_a_trial_split_the_model_and_a_process_alone_holds_it_whole(llm, monkeypatch):
    settings = start(tiny_model(0), tensor_parallel_size=2).llm.settings
    assert not {"tensor_parallel_size", "distributed_executor_backend"} & settings.keys()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)  # what the engine sums up is whole here
    engine = start(tiny_model(0), tensor_parallel_size=2)
    assert engine.llm.settings["tensor_parallel_size"] == 2
    assert engine.llm.settings["distributed_executor_backend"] == "external_launcher"
    assert (engine.llm.environment["RANK"], engine.llm.environment["LOCAL_RANK"]) == ("3", "0")
    assert "RANK" not in os.environ
    words = r"engine.batch_invariant must be the same .* got True where vLLM began without"
    with pytest.raises(ValueError, match=words):
        start(tiny_model(0), batch_invariant=True)
    assert "distributed_executor_backend" not in start(tiny_model(0)).llm.settings  # each rank has its own


@pytest.mark.attack("GPU out of memory")
def test_an_engine_that_closes_in_its_sleep_wakes_first_if_it_can(llm, monkeypatch, caplog):
    for is_full, end in ((False, ["wake kv_cache weights", "shutdown"]), (True, ["sleep", "wake kv_cache weights"])):
        monkeypatch.setattr(llm, "memory_is_full", is_full)
        engine = start(tiny_model(0))
        fake = engine.llm
        engine.sleep()
        for _ in range(2):
            engine.close()
            assert fake.calls[-2:] == end
        assert ("vLLM did not stop cleanly" in caplog.text) == is_full  # the run's own end is what must be told


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 2}, "engine": BFLOAT16}])
def test_a_run_sleeps_wakes_reloads_and_samples_in_every_step(llm, tmp_path, changes):
    result = train(run_spec(**changes), tmp_path / "run", log := MemoryLog(), cache=tmp_path)
    assert (result.state, result.reason) == ("complete", None)
    load = ["wake weights", "reload_weights", "wake kv_cache"]  # the cache comes back after the weights
    if "lora" in changes:
        load = ["wake kv_cache weights", "adapter"]
    step = ["generate", "score", "sleep", *load, "score"]
    evaluation = ["generate", "generate"]
    begin = ["start", "reload_weights", *(["adapter"] if "lora" in changes else []), "generate", *evaluation]
    assert llm.last.calls == [*begin, *step, *step, *evaluation, *evaluation, "shutdown"]
    rounding = 0.5 if changes else 1e-4
    assert all(value < rounding for _, value in log.history("mismatch/after_sync"))


@pytest.mark.slow
@pytest.mark.attack("Diverged run with a slept engine")
def test_a_run_that_diverges_closes_its_engine_awake_and_the_next_run_completes(llm, tmp_path):
    diverged = train(run_spec(optimizer={"learning_rate": 1e30}), tmp_path / "a", MemoryLog(), cache=tmp_path)
    assert diverged.state == "invalid"
    assert llm.last.calls[-1] == "shutdown"
    assert train(run_spec(), tmp_path / "b", MemoryLog(), cache=tmp_path).state == "complete"


def test_one_stale_tensor_is_found_whichever_it_is_and_the_scores_alone_decide_nothing(llm, monkeypatch):
    # by a unit in the last place of bfloat16: no score tells
    policy, newer = tiny_model(0), changed(tiny_model(0), lambda weights: weights * (1 + 2**-7))
    engine, load = start(policy, dtype="bfloat16"), llm.collective_rpc
    for kept in (own := engine.llm.model.state_dict()):

        def misses(self, method, kept=kept, **more):
            before = own[kept].clone()
            answer = load(self, method, **more)
            own[kept].copy_(before)
            return answer

        engine.load_weights(policy.state_dict(), 0)
        place = "model" if kept == "lm_head.weight" else ".".join(kept.split(".")[:-2])  # it is the embeddings
        with monkeypatch.context() as patch:
            patch.setattr(llm, "collective_rpc", misses)
            with pytest.raises(InvalidRun, match=f"the weights of '{place}' in vLLM"):
                engine.load_weights(newer.state_dict(), 1)
    engine.load_weights(newer.state_dict(), 2)
    before = spot_check(engine, policy, engine.generate(PROMPTS, 2, SAMPLING, seed=0, step=0))
    far = tiny_model(5)
    with torch.no_grad():
        far.lm_head.weight.mul_(20)
    assert check_sync(engine, far, before) > 1  # nats: another model, for all that the scores know


def test_updates_below_the_steps_of_a_bfloat16_engine_arrive_on_average_and_the_same_weights_alike(llm):
    policy = tiny_model(0).bfloat16().float()
    engine, start_weights = start(policy, dtype="bfloat16"), policy.state_dict()
    begun = {name: value.clone() for name, value in engine.llm.model.state_dict().items()}
    assert all(torch.equal(begun[name].float(), value) for name, value in start_weights.items())
    # 1e-5 beside weights of about 0.06, which bfloat16 holds in steps of 2.4e-4: to nearest hardly one moves
    updated = {name: value + 1e-5 for name, value in start_weights.items()}
    engine.load_weights(updated, 1)
    moved = {name: value.clone() for name, value in engine.llm.model.state_dict().items()}
    arrived = torch.cat([(moved[n].float() - begun[n].float()).flatten() for n in moved if moved[n].dim() > 1])
    assert float(arrived.mean()) == pytest.approx(1e-5, rel=0.1)
    engine.load_weights(updated, 1)  # as a run that resumes does
    assert all(torch.equal(value, moved[name]) for name, value in engine.llm.model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k_qwen", "math_7b"])
def test_every_arm_of_a_study_at_scale_trains_on_the_pretended_gpu_and_the_first_resumes(llm, name, tmp_path):
    sets = factories.small_sets(name, tmp_path)
    with pretend_cuda():
        for number, arm in enumerate(load_study(name, sets).checked_arms()):
            spec, folder, log = arm.spec, tmp_path / arm.label, MemoryLog()
            log.holds = lambda *_: True
            assert (spec.device, spec.autocast, spec.engine.name) == ("cuda", True, "vllm")
            if resumes := number == 0:
                spec = spec.model_copy(update={"steps": 2})
                assert train(spec, folder, log, cache=tmp_path, should_stop=StopAfter(1)).state == "stopped"
            result = train(spec, folder, log, cache=tmp_path)
            facts = next(values for _, values in log.events if "memory/sleeps" in values)
            sleeps = name == "gsm8k_qwen"  # the others fit awake
            assert facts["memory/sleeps"] == llm.last.settings["enable_sleep_mode"] == sleeps
            kept = {"gradient_checkpointing": False, "engine": spec.engine.model_copy(update={"sleep": sleeps})}
            needed, _ = estimate_run(spec.model_copy(update=kept))
            assert facts["memory/estimate_bytes"] == peak_bytes(needed | {"process": 0})
            assert (result.state, result.reason, log.resumed_at) == ("complete", None, [-1, 1] if resumes else [-1])
            assert llm.last.dtype == torch.bfloat16 and llm.last.adapted.keys() == ({1} if spec.lora else set())


def test_an_evaluation_gives_vllm_all_prompts_at_once(llm):
    spec = run_spec(evaluation={"num_prompts": 70, "num_samples": 2}, sampling={"max_tokens": 1})
    engine = start(tiny_model(0))
    evaluate_run(spec, engine, "validation", step=0)
    assert engine.llm.batches == [140, 70]


@pytest.mark.slow
def test_an_evaluation_leaves_the_gpu_to_vllm_which_reads_the_policy_from_the_host(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(VLLMEngine.Settings, "check_machine", lambda self: None)
    monkeypatch.setenv("COHORT_MIRROR", "none")
    spec = run_spec(autocast=True, device="cuda")
    load, seen, kept = llm.collective_rpc, [], []

    def start_policy(*_):
        policy = tiny_model(0)
        kept.append(ref(policy))
        return policy, tiny_codec()

    monkeypatch.setattr(standalone, "start_policy", start_policy)

    def reload(self, method, args=(), kwargs=None):
        if method == "reload_weights":
            weights = dict(kwargs["weights_iterator"])
            seen.extend((on_cuda(value), value.dtype) for value in weights.values())
            kwargs = {**kwargs, "weights_iterator": weights.items()}
        return load(self, method, args, kwargs)

    generates = llm.generate

    def generate(self, *given, **named):
        gc.collect()
        kept.append(kept[0]() is None)
        return generates(self, *given, **named)

    monkeypatch.setattr(llm, "collective_rpc", reload)
    monkeypatch.setattr(llm, "generate", generate)
    with pretend_cuda(gib=4):
        (found,) = standalone.evaluate_once(spec, "validation", tmp_path, "one").values()
        assert found.metrics["num_prompts"] == 3
        share = {"gpu_memory_utilization": 0.9, "max_batch_rows": 8192, "max_model_len": 512}
        full = run_spec(device="cuda", engine={"name": "vllm", **share})
        with pytest.raises(SpecError, match=r"the run must fit in memory.*kv_cache .*set engine.max_batch_rows=32"):
            standalone.evaluate_once(full, "validation", tmp_path, "two")
    assert set(seen) == {(False, torch.bfloat16)} and kept[1:] and all(kept[1:])


class Counter:
    """What torch's allocator counts: `now` bytes, and the most since the peak was reset."""

    def __init__(self, monkeypatch):
        self.now = self.most = 0
        counts = {"memory_allocated": lambda: self.now, "max_memory_allocated": lambda: self.most,
                  "reset_peak_memory_stats": lambda: vars(self).update(most=self.now), "empty_cache": lambda: None,
                  "is_available": lambda: True}  # fmt: skip
        for name, count in counts.items():
            monkeypatch.setattr(torch.cuda, name, count)

    def use(self, count):
        """Allocate and free so many bytes."""
        self.most = max(self.most, self.now + count)


@pytest.mark.slow
def test_the_memory_of_a_sleeping_engine_is_no_part_of_the_peak(llm, monkeypatch):
    policy = tiny_model(0)
    engine = start(policy, sleep=True)
    torch_counts = Counter(monkeypatch)
    torch_counts.now = 30_000  # the learner
    reset_peak_memory()
    torch_counts.now += sum(fake_vllm.BYTES.values())  # vLLM's pool, awake
    torch_counts.use(5_000)
    assert peak_memory() == 30_000 + 501_000 + 5_000
    reset_peak_memory()
    engine.sleep()
    torch_counts.use(600_000)  # activations, while 501,000 bytes are unmapped
    assert resident_bytes() == 30_000
    assert peak_memory() == 30_000 + 600_000
    load = engine.llm.collective_rpc
    monkeypatch.setattr(engine.llm, "collective_rpc", lambda *a, **k: torch_counts.use(200_000) or load(*a, **k))
    engine.load_weights(policy.state_dict(), 1)  # the weights are mapped again, the cache after them
    assert peak_memory() == 30_000 + 600_000
    assert resident_bytes() == 30_000 + 501_000
    torch_counts.use(200_000)
    assert peak_memory() == 30_000 + 501_000 + 200_000
    engine.sleep()
    engine.close()
    assert resident_bytes() == 30_000 + 501_000  # nothing is held back for the next run
