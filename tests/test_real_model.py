"""A real chat model, whose query heads share keys and whose vocabulary is large: `make test-real`."""

from pathlib import Path

import pytest
import torch
from cohort.harness.data import Prompt, PromptFormat, Sampling
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.policy.forward import state_logprobs, token_logprobs
from cohort.harness.policy.model import load_policy
from cohort.harness.policy.text import load_codec
from transformers import AutoTokenizer

MODEL = Path(__file__).parents[1] / "models" / "smollm2"  # of `make smollm2`
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="the model is not here; `make test-real` makes it and runs this"),
]


@pytest.fixture(scope="module")
def policy():
    """The model, which no test changes."""
    return load_policy(str(MODEL), seed=0)


@pytest.mark.parametrize("system", [None, "You add."])
def test_a_prompt_is_what_the_models_own_template_makes_of_it(system):
    tokenizer, codec = AutoTokenizer.from_pretrained(MODEL), load_codec(str(MODEL), PromptFormat(system=system))
    turns = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": "What is 7-1?"}]
    expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert codec.decode(codec.encode("What is 7-1?")) == expected
    assert codec.encode("What is 7-1?") == tuple(tokenizer(expected, add_special_tokens=False)["input_ids"])


def test_engine_and_learner_give_the_log_probs_of_the_models_own_forward_pass(policy):
    """Of prompts that differ in length, and rows that end at different times, at the end of the model's turn."""
    codec = load_codec(str(MODEL), PromptFormat())
    ends, turn_end = codec.end_ids(policy), AutoTokenizer.from_pretrained(MODEL).convert_tokens_to_ids("<|im_end|>")
    engine = TransformersEngine(TransformersEngine.Settings(), policy, codec)
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


def test_the_head_of_a_large_vocabulary_in_closed_form_has_the_gradient_of_its_numbers(policy):
    hidden = torch.randn(200, policy.config.hidden_size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets = torch.arange(200)
    found = []
    for closed in (True, False):
        policy.zero_grad()
        logprobs, _ = state_logprobs(policy, hidden, targets, 0.7, entropy_gradient=not closed)
        (gradient,) = torch.autograd.grad(logprobs.sum(), hidden)
        found.append((logprobs.detach(), gradient))
    (one, first), (other, second) = found
    assert torch.allclose(one, other, atol=1e-4)
    assert (first - second).norm() <= 1e-5 * second.norm()
