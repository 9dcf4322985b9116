"""What every rollout engine must hold to, for each one found."""

from importlib.util import find_spec

import pytest
import torch
from chats import chat_model, chat_tokenizer
from cohort.harness import plugins
from cohort.harness.data import Prompt, Sampling
from cohort.harness.policy.text import TextCodec
from cohort.harness.policy.tiny import tiny_model
from fakes import tiny_codec

SAMPLING = Sampling(max_tokens=12)
PROMPTS = [Prompt(f"p{i}", text, "0") for i, text in enumerate(["1+2=", "1+2+3+4=", "9-", "7+7=", "8-3+2="])]


@pytest.fixture(params=plugins.names("engine"))
def engine(request):
    if request.param == "vllm" and find_spec("vllm") is None:
        pytest.skip("vllm is not installed; `make test-vllm` runs these tests where it is")
    cls = plugins.load("engine", request.param)
    return cls(cls.Settings(), tiny_model(0), tiny_codec())


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
