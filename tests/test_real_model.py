"""A real chat model, whose query heads share keys and whose vocabulary is large: `make test-real`."""

import json
import multiprocessing
import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from cohort.harness.data import Prompt, PromptFormat, Sampling
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.engines.vllm import VLLMEngine
from cohort.harness.policy.forward import token_logprobs
from cohort.harness.policy.lora import adapter_weights, add_adapter, load_adapter
from cohort.harness.policy.model import load_policy, save_model
from cohort.harness.policy.sources import Base
from cohort.harness.policy.text import load_codec
from cohort.harness.record.run import CHECKPOINTS, model_folder
from cohort.harness.run.evaluate import evaluate_run
from cohort.harness.run.loop import train
from cohort.harness.settings.run import LoRA
from factories import make_spec
from fakes import MemoryLog
from transformers import AutoTokenizer

MODEL = Path(__file__).parents[1] / "models" / "smollm2"  # of `make smollm2`
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="the model is not here; `make test-real` makes it and runs this"),
]

REPEATS: dict[str, object] = {"rewards": {"repetition": {"ngram": 1}}}  # pays differently though no answer is right


@pytest.fixture(scope="module")
def policy():
    """The model, which no test changes."""
    return load_policy(str(MODEL), seed=0)


@pytest.fixture
def run(tmp_path):
    """The settings of the shortest run: sums after worked examples, answers of 6 tokens."""
    for split, count in (("train", 40), ("test", 3)):
        rows = [{"question": f"{split}: {n} + 3 =", "answer": f"That is {n + 3}.\n#### {n + 3}"} for n in range(count)]
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {
        "model": str(MODEL), "prompt.format": "plain", "sampling.max_tokens": 6, "sampling.stop": ["\n\n"],
        "task": {"name": "gsm8k", "path": str(tmp_path / "data"), "template": "{question} ", "shots": 3}, "steps": 2,
        "optimizer.learning_rate": 1e-4, "gates.stuck_groups": None, "rollouts_per_step": 4, "checkpoints.every": 1,
        "evaluation": {"every": 2, "num_prompts": 1, "num_test_prompts": 1, "num_samples": 1},
    }  # fmt: skip


def of(run, algorithm, **changes):
    return make_spec({"name": algorithm, "group_size": 2, "kl_beta": 0.0}, **{**run, **changes})


@pytest.mark.parametrize("system", [None, "You add."])
def test_a_prompt_is_what_the_models_own_template_makes_of_it(system):
    tokenizer, codec = AutoTokenizer.from_pretrained(MODEL), load_codec(str(MODEL), PromptFormat(system=system))
    turns = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": "What is 7-1?"}]
    expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert codec.decode(codec.encode("What is 7-1?")) == expected
    assert codec.encode("What is 7-1?") == tuple(tokenizer(expected, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", [
    TransformersEngine,
    pytest.param(VLLMEngine, marks=pytest.mark.skipif(find_spec("vllm") is None, reason="`make test-vllm` has it")),
])  # fmt: skip
def test_engine_and_learner_give_the_log_probs_of_the_models_own_forward_pass(kind, policy):
    """Of prompts that differ in length, and rows that end at different times, at the end of the model's turn."""
    codec = load_codec(str(MODEL), PromptFormat())
    ends, turn_end = codec.end_ids(policy), AutoTokenizer.from_pretrained(MODEL).convert_tokens_to_ids("<|im_end|>")
    engine = kind(kind.Settings(), policy, codec)
    prompts = [Prompt(f"p{i}", text, "") for i, text in enumerate(["What is 7-1?", "Name one even number below 20."])]
    groups = engine.generate(prompts, 3, Sampling(max_tokens=64), seed=0, step=0)
    lengths = set()
    for group in groups:
        for rollout in group.rollouts:
            start, row = len(group.prompt_token_ids), torch.tensor([[*group.prompt_token_ids, *rollout.token_ids]])
            mask = torch.arange(row.shape[1])[None] >= start
            with torch.no_grad():
                every = policy(input_ids=row).logits[0, start - 1 : -1].log_softmax(-1)
            expected = every.gather(-1, row[0, start:, None])[:, 0]
            logprobs, entropies = token_logprobs(policy, row, mask, 1.0)
            assert torch.allclose(torch.tensor(rollout.logprobs), expected, atol=1e-4)
            assert torch.allclose(logprobs[0, start:], expected, atol=1e-4)
            assert torch.allclose(entropies[0, start:], -(every.exp() * every).sum(-1), atol=1e-4)
            lengths.add(len(rollout.token_ids))
            assert not set(rollout.token_ids[:-1]) & set(ends)
            assert (rollout.token_ids[-1] == turn_end) == (len(rollout.token_ids) < 64)
    assert len(lengths) > 1


@pytest.mark.parametrize(("algorithm", "paid"), [
    ("ppo", REPEATS), ("grpo", REPEATS), ("grpo_self_consistency", {}),
])  # fmt: skip
def test_two_steps_teach_with_a_critic_with_a_group_and_with_votes(run, algorithm, paid, tmp_path):
    log = MemoryLog()
    result = train(of(run, algorithm, **paid), tmp_path / "run", log, cache=tmp_path / "cache")
    assert (result.state, result.summary["rollouts"]) == ("complete", 8)
    assert all(abs(value) < 1e-4 for _, value in log.history("mismatch/kl"))
    critic = log.history("critic/grad_norm")
    assert len(critic) == (2 if algorithm == "ppo" else 0) and all(value > 0 for _, value in critic)


def test_a_killed_run_with_an_adapter_ends_as_one_that_was_left_alone(run, tmp_path):
    spec = of(run, "grpo", lora={"rank": 4}, steps=3, **{"evaluation.every": 3}, **REPEATS)
    kept = {"cache": tmp_path / "cache"}
    child = multiprocessing.get_context("spawn").Process(
        target=train, args=(spec, tmp_path / "killed", MemoryLog()), kwargs=kept
    )
    child.start()
    while not any((tmp_path / "killed" / CHECKPOINTS).glob("step-*")):
        assert child.is_alive()
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    found = []
    for name in ("killed", "whole"):
        summary = train(spec, tmp_path / name, MemoryLog(), **kept).summary
        weights = (Path(model_folder(str(tmp_path / name))) / "adapter_model.safetensors").read_bytes()
        found.append((weights, {k: v for k, v in summary.items() if "second" not in k and "byte" not in k}))
    assert found[0] == found[1]


def test_a_saved_adapter_alone_loads_as_the_policy_that_it_made(policy, tmp_path):
    adapted, row = add_adapter(load_policy(str(MODEL), seed=0), LoRA(rank=4), seed=0), torch.arange(40)[None]
    load_adapter(adapted, {name: torch.ones_like(w) / 300 for name, w in adapter_weights(adapted).items()})
    save_model(tmp_path, adapted, AutoTokenizer.from_pretrained(MODEL), base=Base.of(str(MODEL), 0))
    with torch.no_grad():
        plain, expected = policy(input_ids=row).logits, adapted(input_ids=row).logits
        found = load_policy(str(tmp_path), seed=0)(input_ids=row).logits
    assert torch.allclose(found, expected, atol=1e-3)
    assert not torch.allclose(found, plain, atol=1e-1)


def test_an_evaluation_that_was_cut_off_goes_on_as_if_it_had_not_been(run, policy, tmp_path):
    spec = of(run, "grpo", **{"evaluation.num_test_prompts": 3})
    engine = TransformersEngine(TransformersEngine.Settings(), policy, load_codec(str(MODEL), spec.prompt))
    asked = []

    def cut(done, total):
        asked.append(done)
        if len(asked) == 2:  # after the first part, of one problem: so many weights are read
            raise KeyboardInterrupt

    def evaluated(kept, on_progress=lambda done, total: None):
        return evaluate_run(spec, engine, "test", 0, on_progress, kept=tmp_path / kept, weights=10**12)

    with pytest.raises(KeyboardInterrupt):
        evaluated("cut", cut)
    first = (tmp_path / "cut").read_text()
    assert (asked, first.count("\n")) == ([0, 1], 1)
    assert evaluated("cut").metrics == evaluated("whole").metrics
    assert (tmp_path / "cut").read_text() == (tmp_path / "whole").read_text()
    assert (tmp_path / "cut").read_text().startswith(first)
