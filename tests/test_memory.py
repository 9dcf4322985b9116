"""Memory told before a run: counts by hand, what a pass keeps against what autograd saves, refusals; and after."""

import json
import re
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from cohort.harness.api.runs import estimate_runs
from cohort.harness.api.study import run
from cohort.harness.base.machine import SHARED_GPU
from cohort.harness.checks import memory
from cohort.harness.checks.memory import (
    check_fits,
    check_memory,
    decided,
    estimate,
    estimate_run,
    gib,
    longest,
    peak_bytes,
)
from cohort.harness.checks.memory_count import Shape, count
from cohort.harness.data import Prompt
from cohort.harness.devices.device import GIB, device_bytes, mixed_precision
from cohort.harness.policy import fused_llama
from cohort.harness.policy.forward import Critic, completion_states, prompt_states, recomputes, token_logprobs
from cohort.harness.policy.lora import add_adapter, hold_frozen_products
from cohort.harness.policy.model import model_config, save_model
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from cohort.harness.rewards.format import Format
from cohort.harness.run.build import placed, prepare, run_facts
from cohort.harness.run.step import train_step
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.load import load_study
from cohort.harness.study import runner
from cohort.harness.study.preflight import auto_workers, check_study
from cohort.harness.study.runner import dry_run
from cohort.harness.study.worker import EXECUTE
from factories import make_spec, real_sets, slow_but
from fakes import MemoryLog, tiny_codec
from pretend_cuda import pretend_cuda
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Of the built-in model: 100 x 64 embeddings, tied; per layer 4 x 64 x 64 of attention, 3 x 64 x 192 of the MLP and two
# norms of 64; one norm at the end: 6400 + 3 x (16384 + 36864 + 128) + 64 = 166592.
TINY = 166_592


def parts(algorithm="grpo", prompt_tokens=20, **changes):
    spec = make_spec(algorithm, **changes)
    return estimate(spec, model_config(spec.model), prompt_tokens, torch.device("cpu"))


def model_of(kind, vocab_size=1000, **sizes):
    config = transformers.AutoConfig.for_model(kind, vocab_size=vocab_size, **{"tie_word_embeddings": True, **sizes})
    return config, transformers.AutoModelForCausalLM.from_config(config).eval()


LLAMA_1B = transformers.LlamaConfig(
    hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192,
    vocab_size=128256, tie_word_embeddings=True,
)  # fmt: skip


def test_a_known_shape_has_the_published_number_of_parameters():
    found = estimate(make_spec(dtype="bfloat16"), LLAMA_1B, 20, torch.device("cpu"))
    assert found["policy"] == 2 * 1_235_814_400  # as the model card says


CRITIC = TINY + 64 + 1  # a backbone and a head; the tied head belongs to the embeddings, which the backbone has
# Per layer 4 x 8 x (64 + 64) of attention and 3 x 8 x (64 + 192) of the MLP, times 3.
ADAPTER = 30_720


@pytest.mark.parametrize(
    ("algorithm", "changes", "expected"),
    [
        # The weights, and rearranged copies of them; autocast makes none.
        ("grpo", {}, {"policy": 8 * TINY, "reference": 4 * TINY, "gradients": 4 * TINY, "optimizer": 8 * TINY}),
        ("grpo", {"autocast": True}, {"policy": 4 * TINY}),
        ("grpo", {"dtype": "bfloat16"}, {"policy": 2 * TINY, "optimizer": 4 * TINY}),
        ("ppo", {}, {"critic": 8 * CRITIC, "gradients": 4 * (TINY + CRITIC), "optimizer": 8 * (TINY + CRITIC)}),
        ("ppo", {"autocast": True}, {"critic": 4 * CRITIC}),
        ({"name": "grpo", "kl_beta": 0}, {}, {"reference": 0}),
        ("grpo", {"lora": {"rank": 8}}, {"reference": 0, "gradients": 4 * ADAPTER, "policy": 4 * (TINY + ADAPTER)}),
        # And keys and values of 256 rows, of at most 1 GiB: a block of 128 tokens, 3 layers x 2 x 2 heads x 32 wide.
        ("grpo", {"engine": "vllm"}, {"engine": 4 * TINY + 256 * 128 * 3 * 2 * 2 * 32 * 4, "kv_cache": 0}),
        ("grpo", {"engine": "vllm", "devices": 2, "rollouts_per_step": 640},
         {"engine": 4 * TINY + 320 * 128 * 3 * 2 * 2 * 32 * 4}),
        ("grpo", {"engine": {"name": "vllm", "max_model_len": 4000}}, {"engine": 4 * TINY + 2**30}),
    ],
)  # fmt: skip
def test_weights_gradients_and_moments_of_the_tiny_model_are_counted_by_hand(algorithm, changes, expected):
    assert tiny_model(0).num_parameters() == TINY
    found = parts(algorithm, **changes)
    assert {name: found[name] for name in expected} == expected


def test_the_cache_and_the_distributions_of_sampling_are_counted_by_hand():
    found = parts(rollouts_per_step=64, sampling={"max_tokens": 30}, evaluation={"num_samples": 1})
    # 64 rows x 50 tokens x 2 heads x 32 wide x (4 + 4) bytes, 3 layers and the copy of one
    assert found["kv_cache"] == 64 * 50 * 2 * 32 * 8 * 4
    assert found["sampling"] == 64 * 100 * 25
    fewer = parts(
        rollouts_per_step=64, sampling={"max_tokens": 30}, engine={"name": "transformers", "max_batch_rows": 16}
    )
    assert fewer["kv_cache"] == 16 * 50 * 2 * 32 * 8 * 4
    held_out = parts(rollouts_per_step=8, sampling={"max_tokens": 30}, evaluation={"num_samples": 4})
    assert held_out["sampling"] == 64 * 4 * 100 * 25


def test_counting_leaves_the_random_state_as_it_was():
    before = torch.random.get_rng_state()
    parts("ppo", prompt_tokens=21, lora={"rank": 3})  # not counted by another test
    assert torch.equal(torch.random.get_rng_state(), before)


def test_activations_of_the_tiny_model_are_counted_by_hand():
    # Rows of 50 tokens; 500 // 50 = 10 of the 16 rows at once, so 500 tokens, 300 of them scored.
    found = parts(rollouts_per_step=16, sampling={"max_tokens": 30}, optimizer={"tokens_per_microbatch": 500})
    norm = 4 * (2 * 64 + 1)
    layer = 2 * norm + 4 * (2 * 64 + 2 * 64 + 2) + 4 * 2 * 192
    kept = 500 * (3 * layer + 4 * (64 + 1)) + 300 * 4 * (64 + 100)
    assert found["activations"] == pytest.approx(kept + 3 * 4 * 300 * 100, rel=0.01)
    # PPO's critic keeps as much, less the log-probs, when the logits' temporaries are gone.
    found = parts("ppo", rollouts_per_step=16, sampling={"max_tokens": 30}, optimizer={"tokens_per_microbatch": 500})
    assert found["activations"] == pytest.approx(2 * kept - 4 * 300 * 100, rel=0.01)


SIZES = {
    "llama": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2},
    "qwen2": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gemma2": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt_neox": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "phi": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": False},
}  # fmt: skip


LORA = {"lora": {"rank": 8}}
PLAIN = ({}, {"dtype": "bfloat16"}, {"autocast": True}, {"gradient_checkpointing": True})
SETTINGS = (*PLAIN, *({**LORA, **settings} for settings in PLAIN))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [*(("qwen2", settings) for settings in SETTINGS), *((kind, {}) for kind in SIZES if kind != "qwen2"),
     ("llama", LORA), ("gemma2", {**LORA, "autocast": True}), ("gpt_neox", {"gradient_checkpointing": True})],
    ids=lambda case: case if isinstance(case, str) else " ".join(case) or "plain",
)  # fmt: skip
def test_the_count_is_within_1_percent_of_what_autograd_saves(kind, settings):
    spec = make_spec("ppo", sampling={"max_tokens": 100}, **settings)
    config, policy = model_of(kind, intermediate_size=192, **SIZES[kind])
    policy.to(getattr(torch, spec.dtype))
    if spec.lora is not None:
        add_adapter(policy, spec.lora, 0)
    if spec.lora is not None and spec.autocast:
        hold_frozen_products(policy, torch.bfloat16)
    if recompute := spec.gradient_checkpointing is True:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    critic = Critic(policy)
    policy.train(recompute), critic.train(recompute)
    tokens = torch.randint(3, 100, (4, 128))
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, -100:] = True
    counts = count(Shape.of(spec, config, rows=4, prompt_tokens=28))
    saved = bytes_saved(policy, spec, lambda: token_logprobs(policy, tokens, mask, 1.0))
    trunk = counts.trunk.total(recompute)
    assert trunk + counts.logprobs == pytest.approx(saved, rel=0.01)
    saved = bytes_saved(critic, spec, lambda: critic(mask, completion_states(critic.backbone, tokens, mask, None)))
    assert trunk + counts.values == pytest.approx(saved, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "autocast", "before", "after", "rows"),
    [(2, False, 125, 200, 8), (2, True, 350, 512, 3), (2, False, 30, 820, 3), (14, True, 125, 200, 8)],
)
def test_the_count_of_shared_prompts_is_within_5_percent_of_what_autograd_saves(
    heads, autocast, before, after, rows, monkeypatch
):
    """Half a layer of Qwen2.5-0.5B, with its 2 heads of keys for 14 of queries and with 14; one prompt is shorter. The
    count is a GPU's; a CPU keeps no key for each head of queries."""
    sizes = {"hidden_size": 448, "num_hidden_layers": 1, "num_attention_heads": 14, "num_key_value_heads": heads}
    config, policy = model_of("qwen2", intermediate_size=2432, **sizes)
    monkeypatch.setattr("cohort.harness.policy.forward.sharing_pays", lambda *_: True)
    spec = make_spec(sampling={"max_tokens": after}, autocast=autocast)
    tokens = torch.randint(3, 100, (rows, before + after))
    tokens[:, :before] = tokens[0, :before]
    tokens[-1, 0] = 1
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, before:] = True
    mask[-1, before - 5 : before] = True

    def forward():
        prompts = prompt_states(policy, tokens, mask)
        assert prompts is not None
        return prompts, completion_states(policy, tokens, mask, prompts)

    counts = count(Shape.of(spec, config, rows=rows, prompt_tokens=before, device="cuda"))
    found = counts.trunk.all * 2 * (before - 1) / (rows * (before + after)) + counts.shared.all
    monkeypatch.setattr("cohort.harness.policy.forward.lean_passes", nullcontext)
    on_a_cpu = bytes_saved(policy, spec, forward)
    monkeypatch.setattr("cohort.harness.policy.forward.grouped_attention", nullcontext)
    assert found == pytest.approx(repeated := bytes_saved(policy, spec, forward), rel=0.05)
    assert on_a_cpu < 0.97 * repeated if heads == 2 else on_a_cpu == repeated


def bytes_saved(module, spec, forward):
    """Bytes of all storages that autograd saves in a forward pass, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, mixed_precision(torch.device("cpu"), spec.autocast):
        kept = forward()  # what it returns holds the graph, or storages would be freed and their addresses used again
    assert kept is not None
    return sum(storage.nbytes() for storage in storages.values())


ADVICE = [
    ("grpo", {"rollouts_per_step": 2048, "optimizer.tokens_per_microbatch": 64,
      "engine": {"name": "transformers", "max_batch_rows": 2048}},
     "engine.max_batch_rows rollouts_per_step sampling.max_tokens dtype"),
    ("ppo", {"rollouts_per_step": 4096, "optimizer.tokens_per_microbatch": 65536},
     "gradient_checkpointing optimizer.tokens_per_microbatch dtype"),
    ("ppo", {"rollouts_per_step": 4096, "optimizer.tokens_per_microbatch": 10**6},
     "gradient_checkpointing rollouts_per_step sampling.max_tokens dtype"),
    ("grpo", {"lora.rank": 4, "dtype": "bfloat16"}, ""),
]  # fmt: skip


@pytest.mark.parametrize("case", slow_but(ADVICE[:1], ADVICE))
def test_a_refusal_names_the_settings_that_save_memory_with_what_each_saves(monkeypatch, case):
    algorithm, settings, named = case
    monkeypatch.setattr(memory, "device_bytes", lambda device: 2**20)
    now, copies = estimate_run(decided(make_spec(algorithm, **settings)))[0], 2
    with pytest.raises(SpecError) as refused:
        check_memory(make_spec(algorithm, **settings), copies)
    said = re.findall(r"set (\S+)=(\S+) \(([^)]+) less\)", str(refused.value))
    assert {path for path, *_ in said} == set(named.split())
    saved = []
    for path, value, size in said:
        then, _ = estimate_run(decided(make_spec(algorithm, **settings | {path: yaml.safe_load(value)})))
        saved.append(peak_bytes(now) - peak_bytes(then))
        assert gib(copies * saved[-1]) == size
    assert saved == sorted(saved, reverse=True)


def test_the_advice_is_for_what_is_large():
    sizes = {"policy": 10, "critic": 10, "teacher": 1, "activations": 10, "kv_cache": 1, "sampling": 1}

    def advice(copies=1, device="cpu", **changes):
        components = {name: size * 2**40 for name, size in {**sizes, **changes}.items()}
        with pytest.raises(SpecError) as refused, pretend_cuda():
            check_fits(components, torch.device(device), make_spec("ppo"), copies)
        return str(refused.value).split("; ")[1].split(" or ")

    assert advice(copies=2) == ["use fewer `workers`", "use an algorithm without a critic", "use a smaller teacher",
                                "use a smaller model"]  # fmt: skip
    assert advice(device="cuda", critic=0, teacher=0) == ["use a smaller model", "spread it over more GPUs (devices)"]


def test_workers_share_the_memory_of_a_machine():
    spec, free = make_spec(), device_bytes(torch.device("cpu"))
    found, _ = estimate_run(spec)
    assert found is not None
    check_memory(spec, copies=1)
    with pytest.raises(SpecError, match="workers must fit in memory"):
        check_memory(spec, copies=2 * free // peak_bytes(found))


@pytest.mark.parametrize(("most", "held", "expected"), [(8, 3.5, 3), (2, 3.5, 2), (8, 0.5, 1), (16, 12.5, 16)])
def test_as_many_workers_as_fit_into_memory_are_the_default_and_fewer_are_told(
    tmp_path, monkeypatch, caplog, most, held, expected
):
    study = load_study("quickstart")  # of 12 trials, so that 16 workers hold 12 at a time
    each = max(peak_bytes(estimate_run(arm.spec)[0] or {}) for arm in study.checked_arms())
    for room in ("checks.memory", "devices.device"):
        monkeypatch.setattr(f"cohort.harness.{room}.device_bytes", lambda device: int(held * each))
    monkeypatch.setattr("cohort.harness.study.preflight.default_workers", lambda devices: most)
    assert auto_workers(study) == expected
    assert (f"workers=auto is {expected}, not {most}, because" in caplog.text) == (expected != most)
    if expected == 3:
        assert dry_run(study, tmp_path, workers=None)["workers"] == 3

        def told(*_, workers, **__):
            raise LookupError(workers)

        monkeypatch.setattr(runner, "run_study", told)
        with pytest.raises(LookupError, match=r"^3$"):
            run("quickstart", runs=tmp_path)
    with pretend_cuda():
        assert auto_workers(study) == most


def test_a_model_that_cannot_be_counted_has_a_reason_instead_of_an_estimate(tmp_path):
    transformers.MixtralConfig(hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    found, reason = estimate_run(make_spec(model=str(tmp_path)))
    assert found is None
    assert reason == "the mixtral is a mixture of experts"
    check_memory(make_spec(model=str(tmp_path)))


@pytest.mark.slow
def test_doctor_tells_what_a_run_needs_and_ends_with_2_where_it_cannot_fit_or_there_is_no_run(tmp_path, cohort):
    run_file = tmp_path / "run.yaml"
    run_file.write_text(json.dumps({"task": "arithmetic", "algorithm": "ppo"}))
    assert cohort("doctor", "--run", run_file, "--json") == 0
    (told,) = cohort.json()
    assert (told["run"], told["algorithm"], told["problem"]) == ("ppo", "ppo", None)
    assert told["peak_bytes"] == peak_bytes(told["components"]) < told["device_bytes"]
    huge = ["--set", "rollouts_per_step=800000", "--set", "optimizer.tokens_per_microbatch=100000000"]
    assert cohort("doctor", "--run", run_file, *huge) == 2
    assert "critic" in cohort.out and "activations" in cohort.out
    assert cohort.err.startswith("Error: ppo: the run must fit in memory")
    assert cohort("doctor", "--set", "steps=3") == 2
    assert "--set changes a run: name its file with --run" in cohort.err


class LiveMemory(TorchDispatchMode):
    """Counts each storage that an operation returns until nobody holds it, as CUDA's allocator would: bytes `now`, and
    at the `peak`."""

    def __init__(self):
        super().__init__()
        self.sizes = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.sizes:
                storage = x.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return result

    def _free(self, key):
        self.now -= self.sizes.pop(key)


STEP = {"rollouts_per_step": 8, "sampling": {"max_tokens": 48}, "evaluation": {"num_prompts": 1, "num_samples": 1},
        "optimizer": {"tokens_per_microbatch": 256}, "gradient_checkpointing": False,
        "engine": {"name": "transformers", "max_batch_rows": 4}}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [("grpo", {"group_size": 2}),
     *(pytest.param(*case, marks=pytest.mark.long) for case in
       [("ppo", {"autocast": True, "lora": {"rank": 8}}), ("ppo", {}), ("ppo", {"gradient_checkpointing": True})])],
    ids=str,
)  # fmt: skip
def test_the_estimate_is_within_10_percent_of_the_tensors_of_a_step_on_a_pretended_gpu(
    tmp_path, monkeypatch, algorithm, settings
):
    monkeypatch.setattr(fused_llama, "MAX_PARAMETERS", 0)  # as for a model of real size
    settings = dict(settings)
    size = settings.pop("group_size", 4)
    sizes = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config, policy = model_of("qwen2", 4000, intermediate_size=768, **sizes)
    save_model(tmp_path / "model", policy, tiny_tokenizer())
    raw = {**STEP, "model": str(tmp_path / "model"), "algorithm": {"name": algorithm, "group_size": size}, **settings}
    raw["rewards"] = {"token_entropy": 1}  # a signal for the optimiser, whose moments count too
    spec = make_spec(**{**raw, "device": "cuda"})
    prompts = [replace(p, text=p.text.rjust(24, "1")[-24 + i % 2 :]) for i, p in enumerate(spec.task.prompts("train"))]
    del policy
    with pretend_cuda(), LiveMemory() as live:
        run, _ = prepare(spec, tmp_path, MemoryLog(), tmp_path, lambda: False)
        run.engine.end_ids = ()
        for step in range(2):
            train_step(run, prompts, step)
    found = estimate(spec, config, 24, torch.device("cuda"))
    assert peak_bytes(found) == pytest.approx(live.peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "free", "expected"),
    [# nine tenths of 42 GiB: PPO keeps 1.8 GiB of weights three times, gradients and moments of 3.7 and 7.4, vLLM's 4.7
     ("gsm8k_qwen", 44, {"grpo": (22.3, False), "grpo_self_consistency": (22.3, False), "ppo": (18.8, True)}),
     ("math_7b", 80, {"grpo": (53.7, True), "dr_grpo": (53.7, True)}),
     # 79 GiB, were prompts of a whole micro-batch kept beside one of completions
     ("math_qwen", 80, {f"group_size={size}": (58.1, False) for size in (4, 8, 16)})],
)  # fmt: skip
@pytest.mark.usefixtures("endless_disk")
def test_a_gpus_free_memory_decides_whether_activations_are_recomputed(tmp_path, monkeypatch, study, free, expected):
    monkeypatch.setattr(memory, "longest", lambda codec, prompts: 250)  # by Qwen's tokenizer, about
    bytes_of = memory.device_bytes  # on the host there is always room for the weights that vLLM's sleep keeps
    monkeypatch.setattr(memory, "device_bytes", lambda one: 64 * GIB if one.type == "cpu" else bytes_of(one))
    with pretend_cuda(gib=80, free=free):
        found = estimate_runs(study, real_sets(study, tmp_path), runs=tmp_path)
    assert [(one["problem"], one["device_bytes"]) for one in found] == [(None, (free - 2) * GIB)] * len(found)
    told = {one["run"]: (one["peak_bytes"] / GIB, one["recomputes"]) for one in found}
    assert told == {arm: (pytest.approx(peak, abs=0.6), again) for arm, (peak, again) in expected.items()}


def test_a_run_may_use_what_other_processes_leave_less_a_reserve(monkeypatch):
    with pretend_cuda(gib=80, free=10), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)  # of which the allocator gives 2 again
        patch.setattr(torch.cuda, "memory_allocated", lambda device: 1 * GIB)
        assert device_bytes(torch.device("cuda")) == (10 + 3 - 1 - 2) * GIB
        with pytest.raises(SpecError, match=r"the GPU has 10.00 GiB free beside 2.00 GiB for CUDA"):
            check_fits(parts() | {"policy": 11 * GIB}, torch.device("cuda"), make_spec())
        check_fits(parts() | {"policy": 9 * GIB}, torch.device("cuda"), make_spec())


@pytest.mark.slow
def test_a_run_decides_once_whether_it_recomputes_unless_that_no_longer_fits(tmp_path):
    spec, found = make_spec(device="cuda", rollouts_per_step=16), []
    for free in (80, 2.001, 80):  # 1 MiB above the reserve does not hold it
        with pretend_cuda(free=free):
            run, step = prepare(spec, tmp_path, MemoryLog(), tmp_path, lambda: False)
            found.append((step, recomputes(run.learner.policy)))
            assert run_facts(run)["memory/recomputes"] == found[-1][1]
            run.save(step + 1)
            run.writer.check(wait=True)
    assert found == [(0, False), (1, True), (2, True)]


def test_a_run_that_shares_its_gpu_or_counts_operations_recomputes_and_one_on_a_cpu_does_not(monkeypatch):
    def does(alone=True, **changes):
        return decided(make_spec(**changes), alone=alone).gradient_checkpointing

    assert not does(alone=False)
    with pretend_cuda():
        assert [does(), does(alone=False), does(max_flops=1e12), does(device="cpu")] == [False, True, True, False]
        assert not does(alone=False, gradient_checkpointing=False)
        monkeypatch.setenv(SHARED_GPU, "1")
        assert does()


def test_a_policy_is_rounded_before_it_moves_to_the_gpu():
    policy = tiny_model(0)
    with pretend_cuda(), LiveMemory() as live:
        placed(policy, make_spec(device="cuda", dtype="bfloat16"))
    assert live.peak == pytest.approx(2 * TINY, rel=0.01)  # float32 would be 4, and 6 with both


def test_a_learned_reward_is_counted_whole_on_each_device(tmp_path):
    model_of("qwen2", **SIZES["qwen2"])[0].save_pretrained(tmp_path)
    scorer = transformers.AutoModelForSequenceClassification.from_config(model_config(str(tmp_path)))
    scored = type("Scored", (Format,), {"scorer": str(tmp_path)})
    rewards, size = {"scored": scored()}, sum(p.numel() for p in scorer.parameters())
    assert [parts(rewards=rewards, devices=n)["rewards"] for n in (1, 2)] == [4 * size] * 2
    assert parts()["rewards"] == 0


def test_two_vllms_share_a_gpu_that_holds_both():
    spec = make_spec(engine="vllm")
    with pretend_cuda(gib=5):  # a vLLM of a tiny model takes a little more than 1 GiB
        check_memory(spec, copies=2)
        with pytest.raises(SpecError, match=r"3 workers must fit in memory.*each: kv_cache 1\.\d+ GiB"):
            check_memory(spec, copies=3)


def test_vllm_stays_awake_where_learner_and_engine_surely_fit_together(monkeypatch):
    def sleeps(free=80, alone=True, settled=None, **changes):
        spec = make_spec(engine={"name": "vllm", "sleep": settled}, **changes)
        with pretend_cuda(free=free):
            return decided(spec, alone=alone).engine.sleep

    assert sleeps() is False and sleeps(device="cpu") is None  # without a GPU it never does
    assert sleeps(free=3.2)  # less 2 GiB for CUDA; vLLM takes 1.1
    assert sleeps(alone=False)
    assert sleeps(settled=True) and not sleeps(settled=False, free=3.2)
    assert decided(make_spec(engine="transformers")).engine == make_spec(engine="transformers").engine
    monkeypatch.setenv(SHARED_GPU, "1")
    assert sleeps()


@pytest.mark.slow
def test_workers_that_share_a_gpu_are_counted_together(monkeypatch):
    monkeypatch.setattr("cohort.harness.study.preflight.usable_gpus", lambda: ("0", "1"))
    monkeypatch.setattr("cohort.harness.study.workers.usable_gpus", lambda: ("0", "1"))
    seen = []
    monkeypatch.setattr("cohort.harness.checks.memory.check_memory", lambda spec, copies: seen.append(copies))
    study = load_study("quickstart")
    with pretend_cuda():
        for workers in (None, 2, 3, 5):
            check_study(study, Path("runs"), workers, EXECUTE)
            assert set(seen) == {{None: 1, 2: 1, 3: 2, 5: 3}[workers]}
            seen.clear()
        check_study(study, Path("runs"), 64, EXECUTE, here=False)
    assert not seen  # each worker's own machine is asked


def test_what_a_sleeping_vllm_keeps_on_the_host_under_an_adapter_is_counted_there_and_must_fit(monkeypatch):
    gpu, free = torch.device("cuda"), {"cuda": 80 * GIB, "cpu": 9 * GIB}

    def pinned(**changes):
        spec = make_spec(**{"engine": "vllm", "dtype": "float32", "lora": {"rank": 8}, "devices": 2, **changes})
        found = estimate(spec, LLAMA_1B, 20, gpu)
        assert peak_bytes(found) == peak_bytes({**found, "pinned": 0})  # no memory of the GPU
        check_fits(found, gpu, spec)
        return found["pinned"]

    monkeypatch.setattr(memory, "device_bytes", lambda device: free[device.type])
    monkeypatch.setattr(memory, "usable_gpus", lambda: ("0", "1"))
    with pretend_cuda():  # 1.24 billion weights: 4.6 GiB, on each of two devices
        with pytest.raises(SpecError, match=r"while it sleeps, 9.21 GiB for 2 of it, got 9.00 GiB free; set engine.sl"):
            pinned()
        assert pinned(dtype="bfloat16") == 2 * 1_235_814_400
        assert pinned(engine={"name": "vllm", "tensor_parallel_size": 2}) == 2 * 1_235_814_400
        assert pinned(engine={"name": "vllm", "sleep": False}) == pinned(lora=None) == 0


@pytest.mark.slow
def test_vllms_share_of_a_gpu_must_hold_its_weights():
    # 1.24 billion weights: 2.3 GiB in bfloat16, 4.6 in float32; 1.5 for its passes, 16 bytes for each logit of 256 rows
    # among them; and keys and values, of which a token has 16 layers x 2 x 8 heads x 64 wide, in 2 bytes each: 32 KiB.
    engine = {"name": "vllm", "gpu_memory_utilization": 0.4}
    short = {"lora": {"rank": 8}, "sampling": {"max_tokens": 1}}
    weights, passes = 2 * 1_235_814_400, 2**30 + 16 * 256 * 128_256
    for more, size in (({}, 4 * GIB), ({"max_batch_rows": 2}, weights + 2**30 + 16 * 2 * 128_256 + 2 * 2**22)):
        spec = make_spec(engine=engine | more, dtype="bfloat16", **short)
        with pretend_cuda(gib=10, free=8):  # at most a share of all memory, whoever has the rest
            found = estimate(spec, LLAMA_1B, 20, torch.device("cuda"))
        assert (found["kv_cache"], found["engine"], found["pinned"]) == (size, 0, weights)
    # A row of 2**17 tokens, and the block of 128 that vLLM keeps: 4 GiB
    long = {"dtype": "bfloat16", "engine": {**engine, "max_model_len": 2**17}}
    float32 = {"dtype": "float32", "engine": engine}
    for changes, own, row, share in ((float32, 2 * weights, 2**23, 0.62), (long, weights, 2**32 + 2**22, 0.78)):
        spec = make_spec(**short, **changes)
        least = (own + passes + row) / GIB
        expected = rf"{least:.1f} GiB, got 0.4 of 10.0; set it to {share} or raise engine.tensor_parallel_size"
        with pretend_cuda(gib=10), pytest.raises(SpecError, match=expected):
            estimate(spec, LLAMA_1B, 20, torch.device("cuda"))


def test_the_longest_prompt_is_found_in_tokens_and_short_ones_are_not_read():
    codec, read = tiny_codec(), []
    encode = codec.encode
    codec.encode = lambda text: read.append(text) or encode(text)[: 3 if "=" in text else None]
    texts = ["1+1+1+1+1+1=", "7+7+7+7", "9-9", "5"]  # the first has most characters, and 3 tokens
    assert longest(codec, [Prompt(text, text, "") for text in texts]) == len(encode("7+7+7+7"))
    assert set(read) == {" ", *texts[:2]}
    assert longest(codec, []) == 0
