"""The formula of operations against PyTorch's own counter, and what a run writes of its costs."""

import json
import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from cohort.harness.checks import memory
from cohort.harness.checks.preflight import check_countable
from cohort.harness.data import Prompt
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.policy import flops, library
from cohort.harness.policy.forward import shared_prompts, token_logprobs
from cohort.harness.policy.lora import add_adapter
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run.build import Run
from cohort.harness.run.learner import Learner
from cohort.harness.run.loop import train
from cohort.harness.run.rollout import Rollouts, collate, replayed, taught
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.run import RunSpec
from factories import make_spec, slow_but
from fakes import MemoryLog, StopAfter, tiny_codec
from pretend_cuda import pretend_cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

GROUPED = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "tiny": lambda: tiny_model(0),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)).to(torch.bfloat16),  # the library's own passes
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED, tie_word_embeddings=True)),
}
GRPO = {"name": "grpo", "kl_beta": 0.1, "group_size": 4}
SHARED = {"name": "ppo", "group_size": 4, "critic": "shared"}
TWICE = {"optimizer": {"num_inner_epochs": 2}, "gradient_checkpointing": True}
STEPS = {
    "reference": ("tiny", {"algorithm": GRPO}),
    "critic": ("tiny", {"algorithm": {"name": "ppo", "group_size": 4}}),
    "critic's warm-up": ("tiny", {"algorithm": {"name": "ppo", "group_size": 4}, "critic": {"warmup_steps": 1}}),
    "shared critic's warm-up": ("qwen2", {"algorithm": SHARED, "critic": {"warmup_steps": 1}, **TWICE}),
    "fitted head": ("llama", {"algorithm": {"name": "ppo", "group_size": 4}, "critic": {"head": "fitted"}}),
    "tokens of high entropy": ("tiny", {"algorithm": GRPO, "high_entropy_tokens": 0.2}),
    "replay": ("qwen2", {"algorithm": {"name": "dr_grpo_replay", "group_size": 4}, **TWICE}),
    "own teacher": ("tiny", {"algorithm": {"name": "sdpo", "group_size": 4}}),
    "collisions": ("tiny", {"algorithm": {"name": "optimal_token_baseline", "group_size": 4}}),
    "collisions, and tokens of high entropy": (
        "tiny",
        {"algorithm": {"name": "optimal_token_baseline", "group_size": 4}, "high_entropy_tokens": 0.2},
    ),
    "grouped queries": ("llama", {"algorithm": GRPO}),
    "grouped queries in bfloat16": ("qwen2", {"algorithm": GRPO}),
    "adapter": ("qwen2", {"algorithm": GRPO, "lora": {"rank": 4}}),
    "adapter, checkpointing": ("qwen2", {"algorithm": GRPO, "lora": {"rank": 4}, "gradient_checkpointing": True}),
    "adapter of queries, checkpointing": (
        "qwen2",
        {"algorithm": GRPO, "lora": {"rank": 4, "targets": ["q_proj"]}, "gradient_checkpointing": True},
    ),
    "no shared prompts": ("qwen2", {"algorithm": {"name": "ppo", "group_size": 1}}),
    "minibatches": ("tiny", {"algorithm": GRPO, "optimizer": {"num_minibatches": 2, "num_inner_epochs": 2}}),
    "groups without advantage": ("tiny", {"algorithm": {"name": "dr_grpo", "group_size": 4}}),
    "checkpointing": ("qwen2", {"algorithm": GRPO, "gradient_checkpointing": True}),
}


def counted(work):
    """The result of some work and its operations as PyTorch counts them, with attention as the products that it is."""
    others = {
        torch.ops.aten.addmm_: lambda x, one, other, **_: 2 * one[0] * one[1] * other[1],  # in place
        torch.ops.mkldnn._linear_pointwise: lambda x, *_, out_shape, **__: 2 * math.prod(out_shape) * x[-1],
    }
    counter = FlopCounterMode(display=False, custom_mapping=others)
    counter.mod_tracker = MagicMock(parents=("Global",))  # whose hooks would meet no inference mode
    with sdpa_kernel(SDPBackend.MATH), counter:
        result = work()
    return result, counter.get_total_flops()


def a_spec(**changes) -> RunSpec:
    return make_spec(**{"rollouts_per_step": 8, "sampling": {"max_tokens": 6}, **changes})


@pytest.mark.parametrize("case", slow_but(("reference", "critic", "tokens of high entropy", "grouped queries"), STEPS))
def test_a_step_takes_the_operations_that_pytorch_counts(case, monkeypatch):
    """Sampling, scoring and learning, with completions of full length; without products by room for more tokens."""
    monkeypatch.setattr(library, "_with_room", lambda *both: [x.flatten(0, 1) for x in both])
    model, changes = STEPS[case]
    spec, policy = a_spec(**changes), MODELS[model]().eval()
    if spec.lora is not None:
        add_adapter(policy, spec.lora, 0)
    learner = Learner(spec, policy)
    engine = TransformersEngine(TransformersEngine.Settings(), policy, tiny_codec())
    engine.end_ids = []
    prompts = [Prompt(str(i), chr(65 + i) + "1+2-3" * 6, "1") for i in range(spec.prompts_per_step)]
    group_size = spec.algorithm.group_size
    groups, sampling = counted(lambda: engine.generate(prompts, group_size, spec.sampling_with_limit(), seed=0, step=0))
    if spec.gradient_checkpointing is True:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    costs = flops.Costs.of(policy)
    batch = collate(groups).replace(rewards_B=torch.arange(len(groups) * group_size).remainder(group_size) % 2.0)
    batch, scoring = counted(lambda: taught(learner, learner.annotate(batch), groups))
    batch = learner.algorithm.advantages(batch)
    if case == "groups without advantage":
        batch = batch.replace(advantages_BT=batch.advantages_BT * (torch.arange(len(batch)) >= group_size)[:, None])
    kept = {group.prompt.id: [[*one.token_ids] for one in group.rollouts[:3]] for group in groups}
    run: Any = SimpleNamespace(spec=spec, learner=learner, codec=tiny_codec(), kept=kept)
    learner.replays = replayed(run, prompts, Rollouts(), 0)
    _, learning = counted(lambda: learner.update(batch, 0))
    rows = flops.lengths(groups)
    expected = {"sampling": sampling, "scoring": scoring, "learning": learning}
    tolerance = {"minibatches": 0.03, "fitted head": 0.01}.get(case, 0.002)  # prompts meet by chance; its regression
    assert learner.operations(costs, rows, rows, []) == pytest.approx(expected, rel=tolerance)


def test_a_cold_start_takes_the_operations_that_pytorch_counts():
    policy = MODELS["llama"]()
    tokens, mask = torch.ones(4, 30, dtype=torch.int64), torch.zeros(4, 30, dtype=torch.bool)
    mask[:, 10:] = True
    _, expected = counted(lambda: token_logprobs(policy, tokens, mask, 1.0)[0].sum().backward())
    assert flops.fitted(flops.Costs.of(policy), [(10, [20])] * 4) == pytest.approx(expected, rel=0.002)


def test_a_vocabulary_too_large_to_keep_its_logits_passes_the_head_once_more():
    costs = flops.Costs.of(MODELS["llama"]())
    large = flops.replace(costs, vocabulary=2**22)
    rows, spec = [(10, [20, 20])] * 8, a_spec(algorithm="grpo")
    more, less = (flops.learned(c, rows, spec, share=True, batch_tokens=1024) for c in (large, costs))
    assert more - less == costs.forward.headed * 320


@pytest.mark.parametrize("warms_critic", [False, True])
def test_every_pass_of_a_step_is_counted_once_for_its_purpose(warms_critic):
    spec = a_spec(algorithm={"name": "ppo", "group_size": 4, "critic": "shared", "kl_beta": 0.0},
                  optimizer={"num_minibatches": 2, "num_inner_epochs": 2, "tokens_per_microbatch": 1024})  # fmt: skip
    learner = Learner(spec, tiny_model(0))
    read: Any = {name: SimpleNamespace(distribution=name) for name in ("entropy", "uniform_kl")}
    learner.spec = spec.model_copy(update={"rewards": read})  # each needs a pass
    # 1 for each token, 1000 more for one that reaches the head, 7 for the gradient; of the model of a reward 10^8
    costs = flops.Costs(flops.Work(1, 0, 1000), flops.Work(7), flops.Work(), flops.Work(), 0, 2**28, True, True, False)
    costs = flops.replace(costs, scorers=(flops.replace(costs, forward=flops.Work(10**8, 0, 1)),))
    trained, greedy = [(5, [10, 20, 30, 40])], [(5, [7])]
    drawn = [*trained, (3, [8])]
    # of a prompt all tokens but the last are read once for its completions
    whole, more = 4 + 100, 2 + 8
    scoring = 2 * (whole + more + 108_000 + 12 + 7_000) + 10**8 * (20 + 100 + 11 + 12)  # the latter read rows whole
    scoring += whole + 100_000 + whole  # old log-probs and values
    sampling = 5 + 99 - 3 + 97_000 + 3 + 7 + 8_000 + 5 + 6 + 7_000
    learner.warms_critic = warms_critic
    # both minibatches meet the prompt; the backward pass takes the head again
    learning = 2 * (2 * 4 + 100 + 100_000 + (not warms_critic) * (7 * 100 + 100_000))
    found = learner.operations(costs, drawn, trained, greedy)
    assert found == {"sampling": sampling, "scoring": scoring, "learning": learning}
    learner.lessons, learner.fits_head, learner.still = [(6, [9])], True, [True, False, True, False]
    learner.replayed = [(6, [8, 9, 10, 11])]
    found = learner.operations(costs, drawn, trained, greedy)
    scoring += 6 + 9 + 9_000
    learning = 2 * (5 + 20 + 5 + 40 + 60_000 + (not warms_critic) * (7 * 70 + 60_000))  # one row in each minibatch
    learning += 2 * (4 + 40 + 40_000) + whole  # rows without advantage in each epoch; the fit
    learning += 2 * 2 * (4 * 6 + 38 + 38_000 + 7 * (4 * 6 + 38) + 38_000)
    assert found == {"sampling": sampling, "scoring": scoring, "learning": learning}


def a_run(**changes) -> RunSpec:
    fixed = {"evaluation": {"every": 2, "num_prompts": 4, "num_test_prompts": 4, "num_samples": 2}}
    more = {"cold_start": {"steps": 2}, "steps": 4, "checkpoints": {"every": 1}, "algorithm": "grpo", **fixed}
    more["gates"] = {"stuck_groups": None}  # all rewards are 0
    return a_spec(**{**more, **changes})


@pytest.mark.slow
def test_a_run_writes_its_operations_a_resumed_one_the_same_and_a_limit_ends_it(tmp_path):
    whole, parts, short = MemoryLog(), MemoryLog(), MemoryLog()
    result = train(a_run(), tmp_path / "whole", whole, cache=tmp_path)
    train(a_run(), tmp_path / "parts", parts, cache=tmp_path, should_stop=StopAfter(2))
    resumed = train(a_run(), tmp_path / "parts", parts, cache=tmp_path)
    counts = {name: value for name, value in result.summary.items() if name.startswith("flops_")}
    assert counts == {name: value for name, value in resumed.summary.items() if name.startswith("flops_")}
    assert counts["flops_train"] == sum(counts[f"flops_{name}"] for name in ("sampling", "scoring", "learning"))
    assert min(counts[f"flops_{name}"] for name in ("sampling", "learning", "evaluation", "cold_start")) > 0
    steps = whole.history("flops/train")
    assert steps == sorted(steps) and steps == parts.history("flops/train")
    assert [value for _, value in steps][-1] == counts["flops_train"]
    assert result.summary["core_seconds"] == pytest.approx(torch.get_num_threads() * result.summary["seconds"])
    (_, first), (_, second), *_ = sorted(set(steps))[:3]
    limit = (first + second) / 2
    result = train(a_run(max_flops=limit), tmp_path / "short", short, cache=tmp_path)
    assert result.state == "complete"
    assert result.summary["flops_train"] == second >= limit > first
    assert [step for step, _ in short.history("validation/accuracy")] == [0, 2]
    assert [step for step, _ in short.history("test/accuracy")] == [2]
    again = train(a_run(max_flops=limit), tmp_path / "short", short, cache=tmp_path)  # its last checkpoint spent them
    assert again.summary["flops_train"] == second


def test_a_reference_of_its_own_is_counted_as_such_and_time_on_every_thread(tmp_path):
    for reference in ("tiny", None):
        spec = a_run(kl={"reference": reference})
        engine: Any = SimpleNamespace(exact_logprobs=True)
        learner: Any = SimpleNamespace(policy=tiny_model(0), reference=tiny_model(1))
        run = Run(spec, engine, learner, MemoryLog(), tmp_path, tiny_codec())
        assert run.costs is not None and run.costs.reference == (flops.Costs.of(tiny_model(1)) if reference else None)
        threads = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            run.charge(2.0)
            run.charge(0.5)
        finally:
            torch.set_num_threads(threads)
        assert (run.totals.seconds, run.spent) == (2.5, {"core_seconds": 7.5})
        run.spec = a_run(device="cuda", devices=2)
        with pretend_cuda():
            run.charge(1.5)
        assert (run.totals.seconds, run.spent) == (4.0, {"core_seconds": 7.5, "gpu_seconds": 3.0})
        run.spec = spec
        assert run.flops_train == 0 and not run.is_spent and "flops_train" not in run.summary()
        run.charge_flops(lambda costs: {"learning": 5.0, "evaluation": 9.0})
        told = run.charge_flops(lambda costs: {"learning": 2.0, "cold_start": 1.0})
        assert told == {"flops/learning": 7, "flops/evaluation": 9, "flops/cold_start": 1, "flops/train": 7}
        for limit, is_spent in ((7.0, True), (7.1, False), (None, False)):
            run.spec = a_run(max_flops=limit)
            assert run.is_spent == is_spent


def test_operations_end_no_run_whose_model_is_not_counted(tmp_path):
    config = {"model_type": "mixtral", "num_local_experts": 4, **GROUPED}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match=r"max_flops must be left out for model .* mixtral .*; use steps"):
        check_countable(a_run(model=str(tmp_path), max_flops=1e9))


def test_long_completions_read_their_prompts_again_for_a_mask_would_cost_more(monkeypatch):
    for model, count, pays in (
        (MODELS["llama"](), 16, True),
        (MODELS["llama"](), 512, False),
        (tiny_model(0), 512, True),
    ):
        tokens, rows = torch.ones((4, 6 + count), dtype=torch.int64), [(6, [count] * 4)]
        mask = (torch.arange(6 + count) >= 6).expand(4, -1)
        assert (shared_prompts(model, tokens, mask) is not None) == pays == flops.Costs.of(model).shares(rows)
        monkeypatch.setattr(memory, "empty_model", lambda *_, model=model: model)
        long = a_spec(sampling={"max_tokens": count})
        assert memory.run_sizes(long)["shares_prompts"] == pays
