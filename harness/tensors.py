"""Padding, masked sums, token log-probs and KL estimators: the one place where logits are shifted onto tokens.

Column t of every `_BT` tensor describes token t of its row; the logits that produced it stand in column t - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def pad_right(rows: Sequence[Sequence[Any]], dtype: torch.dtype, width: int | None = None) -> Tensor:
    """[B, T] with each row from column 0 and zeros after it; T is `width` or the longest row."""
    width = max(map(len, rows)) if width is None else width
    result = torch.zeros(len(rows), width, dtype=dtype)
    for i, row in enumerate(rows):
        result[i, : len(row)] = torch.as_tensor(row, dtype=dtype)
    return result


def pad_left(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """([B, T] tokens with each row ending in the last column, [B, T] bool mask of what is not padding)."""
    width = max(map(len, rows))
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, width - len(row) :] = torch.as_tensor(row)
        mask[i, width - len(row) :] = True
    return tokens, mask


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of `values` where `mask` is True, 0 where it never is."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def whiten(values: Tensor, mask: Tensor, floor: float = 1e-8) -> Tensor:
    """`values` shifted and scaled to mean 0 and variance 1 (population) over `mask`, 0 outside it.

    In float64, and exact zeros for equal values: the rounding of their mean would be scaled up to advantages.
    """
    exact = values.double()
    centred = exact - masked_mean(exact, mask)
    variance = masked_mean(centred**2, mask)
    varies = values.masked_fill(~mask, torch.inf).amin() < values.masked_fill(~mask, -torch.inf).amax()
    return torch.where(varies & mask, centred * torch.rsqrt(variance + floor), 0.0).to(values.dtype)


def hidden_states(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    """[B, T, H] last hidden states of a causal language model for right-padded rows.

    No attention mask: causal attention never looks at the padding on the right, and positions start at 0.
    """
    return backbone(model)(input_ids=tokens_BT, use_cache=False).last_hidden_state


def backbone(model: nn.Module) -> nn.Module:
    """The part of a causal language model that turns token ids into hidden states."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model.base_model  # pyright: ignore


def token_logprobs(
    model: nn.Module,
    tokens_BT: Tensor,
    mask_BT: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    chunk: int = 4096,
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies), both [B, T] nats, at least float32: of the tokens in `mask_BT`, and 0 elsewhere.

    The language-model head runs on the masked positions only, `chunk` at a time, so that [B, T, V] never exists.
    Logits are divided by `temperature` (taken as 1 when it is 0), as the sampler does. Entropies carry a gradient
    only if asked.
    """
    hidden = hidden_states(model, tokens_BT)[:, :-1][mask_BT[:, 1:]]  # the state before each masked token
    targets = tokens_BT[:, 1:][mask_BT[:, 1:]]
    head = model.get_output_embeddings()  # pyright: ignore
    logprobs, entropies = [], []
    for part, target in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        logits = _at_least_float32(head(part)) / (temperature or 1.0)
        all_logprobs = F.log_softmax(logits, dim=-1)
        logprobs.append(all_logprobs.gather(-1, target[:, None])[:, 0])
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropies.append(-(all_logprobs.exp() * all_logprobs).sum(-1))
    return _scatter(logprobs, mask_BT), _scatter(entropies, mask_BT)


def token_values(backbone: nn.Module, head: nn.Linear, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T], at least float32: the value of the state in which each token in `mask_BT` was chosen, 0 elsewhere."""
    hidden = backbone(input_ids=tokens_BT, use_cache=False).last_hidden_state[:, :-1][mask_BT[:, 1:]]
    return _scatter([_at_least_float32(head(hidden.to(head.weight.dtype)))[:, 0]], mask_BT)


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _scatter(parts: list[Tensor], mask_BT: Tensor) -> Tensor:
    flat = torch.cat(parts)
    return torch.zeros(mask_BT.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask_BT, flat)


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p - log q: unbiased per token for KL(p || q) under samples of p, high variance (Schulman 2020, k1)."""
    return logprobs - ref_logprobs


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased for KL(p || q) under samples of p, never negative (Schulman 2020, k3).

    The log-ratio is clamped to [-20, 20] so that the exponential stays finite.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(-20, 20)
    return torch.exp(log_ratio) - 1 - log_ratio
