"""The lean decoder against the library's own forward pass, and which models it must leave alone."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from cohort.harness.base.tensors import pad_left
from cohort.harness.data import Prompt, Sampling
from cohort.harness.engines import _decoding
from cohort.harness.engines._decoding import LibraryDecoder
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.policy import forward, fused_llama
from cohort.harness.policy.forward import completion_states, prompt_states, token_logprobs
from cohort.harness.policy.fused_llama import LeanDecoder
from cohort.harness.policy.lora import add_adapter
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.settings.run import LoRA
from fakes import tiny_codec
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
SIZES = {
    "vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def config(kind, **changes):
    return kind(**{**SIZES, **changes})


MODELS = {
    "llama": lambda: LlamaForCausalLM(config(LlamaConfig)),
    "llama, tied": lambda: LlamaForCausalLM(config(LlamaConfig, tie_word_embeddings=True)),
    "llama, wide heads, other angles": lambda: LlamaForCausalLM(
        config(LlamaConfig, head_dim=10, rope_parameters=LLAMA3, rms_norm_eps=1e-3)
    ),
}


def randomised(model):
    """Norms away from 1 and biases away from 0, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = (parameter.data if parameter.dim() == 1 else 0) + 0.2 * noise
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_the_lean_decoder_gives_the_logits_of_the_library(name):
    model = randomised(MODELS[name]())
    assert fused_llama.recognised(model)
    tokens, mask = pad_left([[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]])
    with torch.inference_mode():
        lean, library = LeanDecoder(model, 12), LibraryDecoder(model, 12)
        pairs = [(lean.prefill(tokens, mask), library.prefill(tokens, mask))]
        for decoder in (lean, library):
            decoder.expand(2)
        for step, kept in enumerate([None, torch.tensor([0, 1, 5, 3]), None, torch.tensor([3, 1])]):
            if kept is not None:
                for decoder in (lean, library):
                    decoder.select(kept)
            chosen = torch.arange(len(lean.positions)) + 20 + step
            pairs.append((lean.step(chosen), library.step(chosen)))
    for mine, theirs in pairs:
        assert mine.shape == theirs.shape
        assert theirs.std() > 0.1
        assert mine == pytest.approx(theirs, abs=1e-5)


def library(model):
    """A copy that is not recognised, because of a hook that changes nothing."""
    other = deepcopy(model)
    other.register_forward_hook(lambda module, inputs, output: output)
    return other


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("columns", [7, 140])  # plain products, the library's kernel
def test_logprobs_and_gradients_are_those_of_the_library(name, columns, monkeypatch):
    """In float64, the library's norms in float32. Token 0 is padding: sampled it counts. A critic's are compared with
    rows that are read whole (`test_learner.py`)."""
    monkeypatch.setattr(forward, "sharing_pays", lambda *_: True)
    starts = torch.tensor([4, 4, 2, 2, 3])
    tokens = torch.randint(50, (5, columns), generator=torch.Generator().manual_seed(0))
    tokens[1, :4], tokens[3, :2] = tokens[0, :4], tokens[2, :2]
    tokens[:, 5] = 0
    column = torch.arange(columns)
    mask = (column >= starts[:, None]) & (column < torch.tensor([columns, 6, columns - 1, 7, 5])[:, None])
    model, results = nn.Module.to(randomised(MODELS[name]()), torch.float64), []
    for body in (model, library(model)):
        prompts = prompt_states(body, tokens, mask)
        assert prompts is not None and (prompts.lean is None) == (body is not model)
        hidden = completion_states(body, tokens, mask, prompts)
        logprobs, entropies = token_logprobs(body, tokens, mask, 0.8, hidden, entropy_gradient=True)
        (logprobs * torch.cos(column) + entropies).sum().backward()
        prompts.backward()
        results.append((logprobs, {key: p.grad for key, p in body.named_parameters()}))
    (mine, my_gradients), (theirs, gradients) = results
    assert theirs.abs().max() > 0.1 and torch.allclose(mine, theirs, rtol=0, atol=1e-5)
    for key, gradient in gradients.items():
        assert gradient.norm() > 0, key
        assert (my_gradients[key] - gradient).norm() <= 2e-6 * gradient.norm(), key


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_is_recognised_exactly_where_its_policy_is(tied):
    for vocabulary in (60_000, 100_000):  # times 512 columns of embedding and head: 31 and 51 million
        sizes = {"vocab_size": vocabulary, "hidden_size": 512 if tied else 256, "tie_word_embeddings": tied}
        with torch.device("meta"):
            policy = LlamaForCausalLM(config(LlamaConfig, **sizes))
        is_small = vocabulary == 60_000
        assert fused_llama.recognised(policy) is fused_llama.recognised(policy.model) is is_small


def test_rollouts_are_those_of_the_library_with_stop_texts_ended_rows_and_prompts_of_two_lengths(monkeypatch):
    prompts = [Prompt(f"p{i}", text, "0") for i, text in enumerate(["1+2=", "1+2+3+4=", "9-"])]
    model: Any = tiny_model(0)
    with torch.no_grad():  # end-of-sequence about every tenth token
        model.get_input_embeddings().weight[1] = model.get_input_embeddings().weight.mean(0) * 25

    def rollouts():
        engine = TransformersEngine(TransformersEngine.Settings(), model, tiny_codec())
        sampling = Sampling(max_tokens=16, stop=("a", "7"), temperature=0.8, top_p=0.95)
        return [r for g in engine.generate(prompts, 8, sampling, seed=1, step=2) for r in g.rollouts]

    lean = rollouts()
    monkeypatch.setattr(_decoding, "recognised", lambda model: False)
    library = rollouts()
    assert [r.text for r in lean] == [r.text for r in library]
    assert [r.finish_reason for r in lean] == [r.finish_reason for r in library]
    assert len({len(r.token_ids) for r in lean}) > 5
    for mine, theirs in zip(lean, library, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


UNKNOWN = {
    "adapter": lambda: add_adapter(tiny_model(0), LoRA(rank=2), seed=0),
    "hook": lambda: library(tiny_model(0).model),
    "replaced activation": lambda: (model := tiny_model(0), setattr(model.model.layers[0].mlp, "act_fn", nn.GELU()))[0],
    "other class": lambda: type("Derived", (LlamaForCausalLM,), {})(config(LlamaConfig)),
    "activation": lambda: LlamaForCausalLM(config(LlamaConfig, hidden_act="gelu")),
    "biases behind attention": lambda: LlamaForCausalLM(config(LlamaConfig, attention_bias=True)),
    "biases in the feed-forward part": lambda: LlamaForCausalLM(config(LlamaConfig, mlp_bias=True)),
    "angles that depend on the length": lambda: LlamaForCausalLM(
        config(LlamaConfig, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    ),
    "keys that heads share": lambda: LlamaForCausalLM(config(LlamaConfig, num_key_value_heads=2)),
    "another family": lambda: Qwen2ForCausalLM(config(Qwen2Config)),
    "bfloat16": lambda: nn.Module.to(tiny_model(0), torch.bfloat16),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_model_with_anything_unusual_is_left_to_the_library(name):
    assert not fused_llama.recognised(UNKNOWN[name]())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not fused_llama.recognised(tiny_model(0))
    assert fused_llama.recognised(tiny_model(0))
