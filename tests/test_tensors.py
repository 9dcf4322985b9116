"""The token shift, padding and log-probs, against a plain loop over the model's own logits."""

import torch

from harness.policy.forward import token_logprobs
from harness.policy.tiny import tiny_model
from harness.tensors import masked_mean, pad_left, pad_right


def test_left_padding_ends_every_row_in_the_last_column():
    tokens, mask = pad_left([(5, 6), (7,)])
    assert tokens.tolist() == [[5, 6], [0, 7]]
    assert mask.tolist() == [[True, True], [False, True]]


def test_right_padding_starts_every_row_in_the_first_column():
    assert pad_right([(5, 6), (7,)], torch.int64).tolist() == [[5, 6], [7, 0]]


def test_masked_mean_of_an_empty_mask_is_zero():
    assert masked_mean(torch.ones(3), torch.zeros(3, dtype=torch.bool)).item() == 0


def test_column_t_holds_the_logprob_and_entropy_of_token_t():
    model = tiny_model(0).double()
    rows = [[5, 9, 11, 30, 2, 1], [8, 40, 3]]
    tokens = pad_right(rows, torch.int64)
    mask = pad_right([[0, 0, 1, 1, 1, 1], [0, 1, 1]], torch.bool)
    logprobs, entropy = token_logprobs(model, tokens, mask, 0.7, chunk=2)
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


def test_entropy_carries_a_gradient_only_when_asked():
    model, tokens = tiny_model(0), torch.tensor([[5, 9, 11]])
    mask = torch.tensor([[False, True, True]])
    assert not token_logprobs(model, tokens, mask, 1.0)[1].requires_grad
    assert token_logprobs(model, tokens, mask, 1.0, entropy_gradient=True)[1].requires_grad
