"""What every rollout engine must hold to, for each one found."""

from importlib.util import find_spec

import pytest
import torch

from harness import plugins
from harness.policy.tiny import tiny_model, tiny_tokenizer
from harness.types import Prompt, Sampling

PROMPTS = [Prompt(f"p{i}", text, "0") for i, text in enumerate(["1+2=", "1+2+3+4=", "9-", "7+7=", "8-3+2="])]
SAMPLING = Sampling(max_tokens=12)


@pytest.fixture(params=plugins.names("engine"))
def engine(request):
    if request.param == "vllm" and find_spec("vllm") is None:
        pytest.skip("vllm is not installed; `make test-vllm` runs these tests where it is")
    cls = plugins.load("engine", request.param)
    return cls(cls.Settings(), tiny_model(0), tiny_tokenizer())


def test_one_group_per_prompt_in_order_with_the_group_size_asked_for(engine):
    groups = engine.generate(PROMPTS, 3, SAMPLING, seed=0, step=0)
    assert [g.prompt for g in groups] == PROMPTS
    assert [len(g.rollouts) for g in groups] == [3] * 5


def test_rollouts_respect_the_limit_and_say_how_they_ended(engine):
    for group in engine.generate(PROMPTS, 4, SAMPLING, seed=0, step=0):
        for r in group.rollouts:
            assert 1 <= len(r.token_ids) <= 12
            assert len(r.logprobs) == len(r.token_ids)
            assert all(value <= 0 for value in r.logprobs)
            assert (r.finish_reason == "stop") == (r.token_ids[-1] == tiny_tokenizer().eos_token_id)
            assert "<eos>" not in r.text


def test_the_same_key_repeats_the_same_rollouts(engine):
    first, again = (engine.generate(PROMPTS, 3, SAMPLING, seed=4, step=2) for _ in range(2))
    assert first == again


def test_a_row_does_not_depend_on_the_batch_that_it_is_in(engine):
    together = engine.generate(PROMPTS, 4, SAMPLING, seed=0, step=0)
    for i, prompt in enumerate(PROMPTS):
        (alone,) = engine.generate([prompt], 2, SAMPLING, seed=0, step=0)
        assert [r.token_ids for r in alone.rollouts] == [r.token_ids for r in together[i].rollouts[:2]]


def test_loaded_weights_take_effect(engine):
    if engine.settings.name == "scripted":
        pytest.skip("samples no model")
    before = engine.generate(PROMPTS, 2, SAMPLING, seed=0, step=0)
    engine.load_weights(tiny_model(1).state_dict(), 1)
    after = engine.generate(PROMPTS, 2, SAMPLING, seed=0, step=0)
    fresh = type(engine)(engine.settings, tiny_model(1), tiny_tokenizer()).generate(
        PROMPTS, 2, SAMPLING, seed=0, step=0
    )
    assert before != after
    assert after == fresh


def test_no_random_state_is_touched(engine):
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    engine.generate(PROMPTS, 2, SAMPLING, seed=0, step=0)
    assert torch.equal(before, torch.random.get_rng_state())
