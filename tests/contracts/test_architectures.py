"""Every path to a log-prob gives what the model's own forward pass gives, for many architectures."""

import math

import pytest
import torch
from architectures import REREAD, SETTINGS, WHOLE, build_model, differences
from cohort.harness.policy import forward
from cohort.harness.policy.forward import token_logprobs
from factories import slow_but

NATS = 1e-4
# One of each kind of head, mask, position and cache; the slow tests have the others.
QUICK = ("llama/tied", "llama/dynamic", "phi3/longrope", "phimoe", "granite", "cohere", "minicpm3", "gpt2", "bloom",
         "gemma2", "gpt_oss", "gpt_neo", "mamba2", "jamba", "recurrent_gemma", "rwkv")  # fmt: skip


@pytest.mark.parametrize("name", slow_but(QUICK, SETTINGS))
def test_engine_learner_and_shared_prompts_give_the_log_probs_of_the_models_own_forward_pass(name):
    engine, learner, shared = differences(build_model(name))
    assert engine < NATS
    assert learner < NATS
    assert math.isnan(shared) == (name in WHOLE or name in REREAD)
    assert math.isnan(shared) or shared < NATS


@pytest.mark.parametrize("head", ["linear", "any"])
@pytest.mark.parametrize("name", slow_but(
    ("granite", "gemma2", "phimoe", "minicpm3"),
    ["granite", "cohere", "gemma2", "phimoe", "gpt2", "mamba", "falcon_h1", "minicpm3", "gptj", "nanochat"],
))  # fmt: skip
def test_the_gradient_is_that_of_the_models_own_forward_pass(name, head, monkeypatch):
    monkeypatch.setattr(forward, "BLOCK_BYTES", {"cpu": 4 * 4 * 100})
    monkeypatch.setattr(forward, "LOGITS_BYTES", {"cpu": 5 * 4 * 100})
    model = build_model(name)
    if head == "any":  # one whose weights only the model's own pass knows to use
        model.get_output_embeddings().__class__ = type("Other", (torch.nn.Linear,), {})
        monkeypatch.setattr(forward, "KEPT_BYTES", 0)
    tokens = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9)[None] >= torch.tensor([[3], [6]])
    token_logprobs(model, tokens, mask, 1.0)[0].sum().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    logprobs = model(input_ids=tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
    logprobs.gather(-1, tokens[:, 1:, None])[:, :, 0][mask[:, 1:]].sum().backward()
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        if parameter.grad is not None:
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-4)
