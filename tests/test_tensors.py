"""The token shift, padding and log-probs, against a plain loop over the model's own logits."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from cohort.harness.base.tensors import checksum, pad_left, pad_right, rounded_on_average, whiten
from cohort.harness.policy import forward
from cohort.harness.policy.forward import token_logprobs
from cohort.harness.policy.tiny import tiny_model
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM


def test_padding_is_on_the_left_or_the_right_and_what_rounding_tells_apart_is_equal_when_whitened():
    tokens, mask = pad_left([(5, 6), (7,)])
    assert tokens.tolist() == [[5, 6], [0, 7]]
    assert mask.tolist() == [[True, True], [False, True]]
    assert pad_right([(5, 6), (7,)], torch.int64).tolist() == [[5, 6], [7, 0]]
    assert whiten(torch.ones(3), torch.zeros(3, dtype=torch.bool)).tolist() == [0, 0, 0]
    mask = torch.tensor([True, True, True, False])  # the last value is far away and outside

    def whitened(apart, around=0.0):
        return whiten(torch.tensor([around, around + apart, around, 9e9], dtype=torch.float64), mask).tolist()

    # three values 0, d, 0 have the mean d / 3 and the variance 2 d^2 / 9, to which 1e-8 is added: 4e-6 / 3 / 1e-4
    assert whitened(0.9e-6) == whitened(-0.9e-6) == whitened(90.0, 1e8) == [0.0] * 4
    assert whitened(4e-6) == pytest.approx([-0.013333, 0.026667, -0.013333, 0], rel=1e-3)
    assert whitened(3.0) == pytest.approx([-(2**-0.5), 2**0.5, -(2**-0.5), 0], abs=1e-6)
    assert whitened(300.0, 1e8)[1] == -whitened(-300.0, -1e8)[1] == pytest.approx(2**0.5, abs=1e-6)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, torch.int32), (torch.bfloat16, torch.int16)])
def test_a_checksum_sees_every_bit_and_neither_order_nor_shape_nor_zeros(dtype, bits):
    values = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    padded = torch.cat([values[3:], torch.zeros(2, 40, dtype=dtype), values[:3]])
    assert checksum(padded.T) == checksum(values)
    assert checksum(values[:2]) + checksum(values[2:]) == checksum(values)
    moved = values.clone()
    moved.view(bits)[0, :2] += torch.tensor([1, -1], dtype=bits)  # their sum stays
    assert checksum(moved) != checksum(values)


def test_column_t_holds_the_logprob_and_entropy_of_token_t(monkeypatch):
    monkeypatch.setattr(forward, "BLOCK_BYTES", {"cpu": 2 * 4 * 100})  # two tokens at once
    model = tiny_model(0).double()
    rows = [[5, 9, 11, 30, 2, 1], [8, 40, 3]]
    tokens = pad_right(rows, torch.int64)
    mask = pad_right([[0, 0, 1, 1, 1, 1], [0, 1, 1]], torch.bool)
    logprobs, entropy = token_logprobs(model, tokens, mask, 0.7)
    assert not entropy.requires_grad
    assert token_logprobs(model, tokens, mask, 0.7, entropy_gradient=True)[1].requires_grad
    expected, spread = torch.zeros(2, 6, dtype=torch.float64), torch.zeros(2, 6, dtype=torch.float64)
    with torch.no_grad():
        for i, row in enumerate(rows):
            for t in range(1, len(row)):
                if mask[i, t]:  # a forward over the prefix alone, unpadded
                    logits = model(input_ids=torch.tensor([row[:t]])).logits[0, -1]
                    every = torch.log_softmax(logits / 0.7, -1)
                    expected[i, t] = every[row[t]]
                    spread[i, t] = -(every.exp() * every).sum()
    assert torch.allclose(logprobs, expected, atol=1e-12)
    assert torch.allclose(entropy, spread, atol=1e-12)
    assert logprobs[~mask].abs().sum() == 0


def head_of(vocabulary, *, bias, tied):
    config = Qwen2Config(vocab_size=vocabulary, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, intermediate_size=4, tie_word_embeddings=tied)  # fmt: skip
    model = Qwen2ForCausalLM(config).double()
    if bias:
        model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, vocabulary, dtype=torch.float64))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kept_bytes", [forward.KEPT_BYTES, 0])
@pytest.mark.parametrize(("chunk", "block"), [(1, 1), (3, 2), (4, 4), (5, 7), (9, 2)])
def test_the_head_in_chunks_has_the_gradient_of_its_numbers(chunk, block, kept_bytes, monkeypatch):
    """In float64, of states, weights and bias, of log-probs and entropies, for 9 tokens and two vocabularies."""
    for vocabulary, bias in ((2, True), (11, False)):
        monkeypatch.setattr(forward, "LOGITS_BYTES", {"cpu": 8 * vocabulary * chunk})
        monkeypatch.setattr(forward, "BLOCK_BYTES", {"cpu": 4 * vocabulary * block})
        monkeypatch.setattr(forward, "KEPT_BYTES", kept_bytes)
        model, draw = head_of(vocabulary, bias=bias, tied=False), torch.Generator().manual_seed(0)
        hidden = torch.randn(9, 8, dtype=torch.float64, generator=draw).requires_grad_()
        targets = torch.randint(vocabulary, (9,), generator=draw)
        own = list(model.lm_head.parameters())

        def found(entropy, hidden, *own, model=model, targets=targets):
            return forward.state_logprobs(model, hidden, targets, 0.7, entropy_gradient=entropy)

        for entropy in (True, False):  # without: in closed form, the entropies without gradient
            assert torch.autograd.gradcheck(partial(found, entropy), (hidden, *own))
        apart, closed = (found(entropy, hidden, *own) for entropy in (True, False))
        assert all(torch.allclose(x, y, rtol=0, atol=1e-12) for x, y in zip(apart, closed, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_chunks_gives_what_it_gives_at_once_and_keeps_no_logits_it_can_compute(autocast, tied, monkeypatch):
    model = head_of(100, bias=False, tied=tied).float()
    tokens = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9).expand(2, -1) >= 2  # 14 tokens
    found = []
    for chunk, limit in ((14, forward.KEPT_BYTES), (3, forward.KEPT_BYTES), (3, 1000)):  # 14 x 100 x 4 bytes of logits
        monkeypatch.setattr(forward, "KEPT_BYTES", limit)
        monkeypatch.setattr(forward, "LOGITS_BYTES", {"cpu": chunk * 4 * 100})
        monkeypatch.setattr(forward, "BLOCK_BYTES", {"cpu": min(chunk, 14) * 4 * 100})
        kept: list[torch.Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x, seen=kept: seen.append(x) or x, lambda x: x)
        model.zero_grad()
        for watch in (hooks, nullcontext()):  # the second pass adds to what the first has left
            with watch, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                logprobs, entropies = token_logprobs(model, tokens, mask, 0.7, entropy_gradient=True)
            (logprobs + 0.1 * entropies).sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        products = [x for x in kept if x.shape[-1] == 100]
        assert chunk == 14 or all(x.float().sum(-1).abs().max() < 0.05 for x in products), "they became gradients"
        found.append((logprobs, entropies, gradients, bool(products)))
    once, *parts = found
    for part in parts:
        assert all((part[i] - once[i]).abs().max() <= 3e-6 for i in (0, 1))
        rounding = 5e-3 if autocast else 2e-5  # of a gradient: bfloat16 or float32, whose sums differ by processor
        assert all((x - y).norm() <= rounding * y.norm() for x, y in zip(part[2], once[2], strict=True))
    assert [has_logits for *_, has_logits in found] == [True, True, False]


def test_the_logits_of_a_large_vocabulary_are_never_more_than_a_gibibyte():
    vocabulary, gpu, size = 151_936, torch.device("cuda"), 4 * 151_936
    tokens = [forward.chunk_tokens(vocabulary, gpu, dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert tokens == [883, 1766]  # the gradient of a head is read and written once for so many
    block = forward.block_tokens(vocabulary, gpu)
    assert size * (tokens[0] + 4 * block) <= 2**30  # logits, log-probs and two temporaries, or their gradients
    assert forward.is_recomputed(8192, vocabulary) and not forward.is_recomputed(8192, 100)


def test_rounding_to_bfloat16_keeps_the_mean_and_what_bfloat16_holds():
    held = torch.tensor([1.0, -0.02, 0.0, 3e38, -torch.inf]).bfloat16().float()
    assert torch.equal(rounded_on_average(held).float(), held)
    # Between 1 and the next number, 1 + 1/128, a quarter of the way: a quarter goes up. Standard error: 0.0007.
    for sign in (1, -1):
        values = torch.full((400_000,), sign * (1 + 0.25 / 128))
        rounded = rounded_on_average(values)
        assert {sign * value for value in rounded.tolist()} == {1.0, 1 + 1 / 128}
        assert float((rounded.float().abs() - 1).mean() * 128) == pytest.approx(0.25, abs=0.004)
        assert torch.equal(rounded, rounded_on_average(values))
    assert not torch.equal(rounded[1:], rounded_on_average(values[1:]))
