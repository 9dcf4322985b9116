"""Decodes with the models that `fused_llama` recognises, over fused weights and one cache.

The cache holds the keys and values of all layers in one tensor, so that rows enter and leave it in one operation.
Attention of a single token is two batched products, which on a CPU take a third of the library's fused kernel.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fused_llama import Fused, Layer, Shape, fuse, normalise, rotate, rotations


class LeanDecoder:
    """Decodes one batch under `torch.inference_mode`, with the model's weights at the time of construction."""

    def __init__(self, model: nn.Module, capacity: int):
        """`capacity` is the number of tokens, prompt and completion, that a row can have."""
        self.model: Fused = _contiguous(fuse(model))
        self.head = (model.get_output_embeddings().weight * self.model.norm).t().contiguous()  # pyright: ignore
        self.capacity = capacity
        self.turns = rotations(model, capacity)

    def prefill(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """[P, V] logits after the left-padded prompts, [P, T] with a mask that is False for padding."""
        shape, (rows, width) = self.model.shape, tokens.shape
        heads, kv_heads = shape.query_heads, shape.kv_heads
        head_width = shape.head_width
        self.length = width
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        turns = self.turns[positions][:, None]
        allowed = torch.ones(width, width, dtype=torch.bool, device=mask.device).tril() & mask[:, None, None, :]
        allowed |= torch.eye(width, dtype=torch.bool, device=mask.device)  # a padding token reads itself: no NaN
        x = self.model.embedding[tokens.flatten()]
        self.cache = x.new_empty(len(self.model.layers), 2, rows, kv_heads, self.capacity, head_width)
        for layer, cache in zip(self.model.layers, self.cache, strict=True):
            parts = _project(x, layer, shape).view(rows, width, -1, head_width).transpose(1, 2)
            cache[0, :, :, :width] = rotate(parts[:, heads : heads + kv_heads], turns)
            cache[1, :, :, :width] = parts[:, heads + kv_heads :]
            read = F.scaled_dot_product_attention(
                rotate(parts[:, :heads], turns),
                cache[0, :, :, :width],
                cache[1, :, :, :width],
                attn_mask=allowed,
                scale=1.0,
                enable_gqa=heads != kv_heads,
            )
            x = _finish(x, read.transpose(1, 2).reshape(len(x), -1), layer, shape)
        self.positions = positions[:, -1]
        self.bias = None if bool(mask.all()) else self._bias(mask)
        return self._logits(x.view(rows, width, -1)[:, -1])

    def expand(self, group_size: int) -> None:
        """Repeat every row `group_size` times, in place of the row."""
        layers, _, rows, *rest = self.cache.shape
        wide = self.cache.new_empty(layers, 2, rows, group_size, *rest)
        wide[..., : self.length, :] = self.cache[:, :, :, None, :, : self.length]
        self.cache = wide.flatten(2, 3)
        self.positions = self.positions.repeat_interleave(group_size)
        if self.bias is not None:
            self.bias = self.bias.repeat_interleave(group_size, dim=0)

    def step(self, tokens: Tensor) -> Tensor:
        """[R, V] logits after one more token of every row."""
        shape, rows = self.model.shape, len(tokens)
        heads, kv_heads = shape.query_heads, shape.kv_heads
        head_width = shape.head_width
        start, self.length = self.length, self.length + 1
        self.positions = self.positions + 1
        turns = self.turns[self.positions][:, None]
        bias = None if self.bias is None else self.bias[:, :, :, : self.length].expand(-1, kv_heads, -1, -1)
        bias = None if bias is None else bias.flatten(0, 1)
        x = F.embedding(tokens, self.model.embedding)
        for layer, (keys, values) in zip(self.model.layers, self.cache, strict=True):
            parts = _project(x, layer, shape)
            keys[:, :, start] = rotate(parts[:, heads : heads + kv_heads], turns)
            values[:, :, start] = parts[:, heads + kv_heads :]
            queries = rotate(parts[:, :heads], turns).view(rows * kv_heads, -1, head_width)
            seen = keys.flatten(0, 1)[:, : self.length].transpose(1, 2)
            scores = torch.bmm(queries, seen) if bias is None else torch.baddbmm(bias, queries, seen)
            read = torch.bmm(torch.softmax(scores, dim=-1), values.flatten(0, 1)[:, : self.length])
            x = _finish(x, read.view(rows, -1), layer, shape)
        return self._logits(x)

    def select(self, lines: Tensor) -> None:
        """Keep these lines. Those that stay in their place are not touched; others must come from beyond the end."""
        count = len(lines)
        places = (lines != torch.arange(count, device=lines.device)).nonzero()[:, 0]
        filled = self.cache[..., : self.length, :]
        filled[:, :, places] = filled[:, :, lines[places]]
        self.cache = self.cache[:, :, :count]
        self.positions = self.positions[lines]
        if self.bias is not None:
            self.bias = self.bias[lines]

    def _logits(self, x: Tensor) -> Tensor:
        return torch.mm(normalise(x, self.model.shape.epsilon), self.head)

    def _bias(self, mask: Tensor) -> Tensor:
        """[P, 1, 1, capacity]: a term of every column's score, minus infinity for padding."""
        bias = torch.zeros(len(mask), self.capacity, dtype=self.cache.dtype, device=mask.device)
        bias[:, : mask.shape[1]].masked_fill_(~mask, -torch.inf)
        return bias[:, None, None]


def _project(x: Tensor, layer: Layer, shape: Shape) -> Tensor:
    """[N, Hq + 2 Hkv, D]: queries, keys and values, not yet rotated."""
    x = normalise(x, shape.epsilon)
    flat = torch.mm(x, layer.qkv) if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, x, layer.qkv)
    parts = flat.view(len(x), -1, shape.head_width)
    if layer.head_norm is not None:
        turned = parts[:, : shape.query_heads + shape.kv_heads]
        turned.copy_(normalise(turned, shape.epsilon) * layer.head_norm)
    return parts


def _finish(x: Tensor, read: Tensor, layer: Layer, shape: Shape) -> Tensor:
    """`x` plus the output of attention, [N, Hq * D], and then of the feed-forward part, in place."""
    x.addmm_(read, layer.out)
    gate, up = torch.mm(normalise(x, shape.epsilon), layer.gate_up).chunk(2, dim=-1)
    return x.addmm_(F.silu(gate).mul_(up), layer.down)


def _contiguous(model: Fused) -> Fused:
    """The same weights laid out for products with few rows."""
    return replace(model, layers=[Layer(*map(_dense, vars(layer).values())) for layer in model.layers])


def _dense(weight: Any) -> Any:
    return None if weight is None else weight.contiguous()
