"""The token shift, padding and log-probs, against a plain loop over the model's own logits."""

import pytest
import torch
from cohort.harness.ground.tensors import checksum, pad_left, pad_right, whiten
from cohort.harness.policy import forward
from cohort.harness.policy.forward import token_logprobs
from cohort.harness.policy.tiny import tiny_model


def test_padding_is_on_the_left_or_the_right_and_an_empty_mask_whitens_to_zero():
    tokens, mask = pad_left([(5, 6), (7,)])
    assert tokens.tolist() == [[5, 6], [0, 7]]
    assert mask.tolist() == [[True, True], [False, True]]
    assert pad_right([(5, 6), (7,)], torch.int64).tolist() == [[5, 6], [7, 0]]
    assert whiten(torch.ones(3), torch.zeros(3, dtype=torch.bool)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, torch.int32), (torch.bfloat16, torch.int16)])
def test_a_checksum_sees_every_bit_and_neither_order_nor_shape_nor_zeros(dtype, bits):
    values = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    padded = torch.cat([values[3:], torch.zeros(2, 40, dtype=dtype), values[:3]])
    assert checksum(padded.T) == checksum(values)
    assert (checksum(values[:2]) + checksum(values[2:]) - checksum(values)) % 2**64 == 0
    moved = values.clone()
    moved.view(bits)[0, :2] += torch.tensor([1, -1], dtype=bits)  # their sum stays
    assert checksum(moved) != checksum(values)


def test_column_t_holds_the_logprob_and_entropy_of_token_t(monkeypatch):
    monkeypatch.setattr(forward, "LOGITS_BYTES", 2 * 4 * 100)  # two tokens at once
    model = tiny_model(0).double()
    rows = [[5, 9, 11, 30, 2, 1], [8, 40, 3]]
    tokens = pad_right(rows, torch.int64)
    mask = pad_right([[0, 0, 1, 1, 1, 1], [0, 1, 1]], torch.bool)
    logprobs, entropy = token_logprobs(model, tokens, mask, 0.7)
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


def test_logits_that_are_computed_again_give_the_same_numbers_and_are_not_kept(monkeypatch):
    model = tiny_model(0).double()
    tokens = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9).expand(2, -1) >= 2  # 14 tokens x 100 x 4 bytes of logits
    monkeypatch.setattr(forward, "LOGITS_BYTES", 3 * 4 * 100)
    found = []
    for limit in (forward.KEPT_BYTES, 1000):
        monkeypatch.setattr(forward, "KEPT_BYTES", limit)
        widths: list[int] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda x, seen=widths: seen.append(x.shape[-1]) or x, lambda x: x
        )
        model.zero_grad()
        with hooks:
            logprobs, entropies = token_logprobs(model, tokens, mask, 0.7, entropy_gradient=True)
        (logprobs + 0.1 * entropies).sum().backward()
        found.append((logprobs, entropies, [p.grad.clone() for p in model.parameters()], 100 in widths))
    (kept, spread, gradients, has_logits), (again, same, others, has_none) = found
    assert torch.equal(kept, again) and torch.equal(spread, same)
    assert all((x - y).norm() <= 1e-12 * x.norm() for x, y in zip(gradients, others, strict=True))
    assert has_logits and not has_none


def test_the_logits_of_a_large_vocabulary_are_never_more_than_a_gibibyte():
    vocabulary = 151_936
    assert 4 * 4 * vocabulary * forward.chunk_tokens(vocabulary) <= 2**30  # logits, log-probs and two temporaries
    assert forward.is_recomputed(8192, vocabulary) and not forward.is_recomputed(8192, 100)


def test_entropy_carries_a_gradient_only_when_asked():
    model, tokens = tiny_model(0), torch.tensor([[5, 9, 11]])
    mask = torch.tensor([[False, True, True]])
    assert not token_logprobs(model, tokens, mask, 1.0)[1].requires_grad
    assert token_logprobs(model, tokens, mask, 1.0, entropy_gradient=True)[1].requires_grad
