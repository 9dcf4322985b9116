"""What every rollout engine must hold to, for each one found."""

from importlib.util import find_spec

import pytest
import torch
from chats import chat_model, chat_tokenizer
from cohort.harness import plugins
from cohort.harness.data import Prompt, Sampling
from cohort.harness.policy.text import TextCodec
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from fakes import tiny_codec

PROMPTS = [Prompt(f"p{i}", text, "0") for i, text in enumerate(["1+2=", "1+2+3+4=", "9-", "7+7=", "8-3+2="])]
SAMPLING = Sampling(max_tokens=12)


@pytest.fixture(params=plugins.names("engine"))
def engine(request):
    if request.param == "vllm" and find_spec("vllm") is None:
        pytest.skip("vllm is not installed; `make test-vllm` runs these tests where it is")
    cls = plugins.load("engine", request.param)
    return cls(cls.Settings(), tiny_model(0), tiny_codec())


def test_one_group_per_prompt_in_order_whose_rollouts_respect_the_limit_and_say_how_they_ended(engine):
    groups = engine.generate(PROMPTS, 4, SAMPLING, seed=0, step=0)
    assert [g.prompt for g in groups] == PROMPTS
    assert [len(g.rollouts) for g in groups] == [4] * 5
    for group in groups:
        for r in group.rollouts:
            assert 1 <= len(r.token_ids) <= 12
            assert len(r.logprobs) == len(r.token_ids)
            assert all(value <= 0 for value in r.logprobs)
            assert (r.finish_reason == "stop") == (r.token_ids[-1] == tiny_tokenizer().eos_token_id)
            assert "<eos>" not in r.text


def test_a_completion_ends_at_the_first_end_of_turn(engine):
    if engine.settings.name == "scripted":
        pytest.skip("samples no model")
    codec = TextCodec(chat_tokenizer())
    policy = chat_model(codec.tokenizer)
    with torch.no_grad():  # some tokens end a turn
        policy.get_input_embeddings().weight[codec.turn_end] = policy.get_input_embeddings().weight.mean(0) * 40
    groups = type(engine)(engine.settings, policy, codec).generate(PROMPTS, 16, SAMPLING, seed=0, step=0)
    rollouts = [r for group in groups for r in group.rollouts]
    assert sum(r.token_ids[-1] == codec.turn_end for r in rollouts) > 4
    for r in rollouts:
        assert codec.turn_end not in r.token_ids[:-1]
        assert (r.finish_reason == "stop") == (r.token_ids[-1] in codec.end_ids())
        assert "<|im_end|>" not in r.text


def test_the_same_key_repeats_the_same_rollouts_and_no_random_state_is_touched(engine):
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first, again = (engine.generate(PROMPTS, 3, SAMPLING, seed=4, step=2) for _ in range(2))
    assert first == again
    assert torch.equal(before, torch.random.get_rng_state())


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
    fresh = type(engine)(engine.settings, tiny_model(1), tiny_codec()).generate(PROMPTS, 2, SAMPLING, seed=0, step=0)
    assert before != after
    assert after == fresh
