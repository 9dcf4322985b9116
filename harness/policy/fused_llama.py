"""Computes plain Llamas with fused weights, for small models whose cost is the library's overhead.

Llamas without anything unusual (`recognised`): RMSNorm, rotary positions, keys for each head, SwiGLU. Three rewritings,
exact up to rounding: query, key and value (and gate and up) are one product; a norm's weight and the attention scale
are multiplied into the next product; queries and keys are reordered so that one complex product rotates them.

A decoder over the same weights keeps all keys and values in one tensor, so that rows enter and leave it in one
operation. Attention of a single token is two batched products: on a CPU a third of the time of the library's kernel.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_PARAMETERS = 50_000_000  # fused weights are copies; in larger models arithmetic outweighs the gain
_LLAMA = "transformers.models.llama.modeling_llama"
_PLAIN = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU)
_SHORT = 128  # tokens in a row, prompt included
_ROTARY = ("default", "linear", "llama3")  # whose angles do not depend on the length of the text
States = tuple[Tensor, Tensor]  # keys and values of a layer


@dataclass(frozen=True)
class Layer:
    """One layer's weights, each [in, out]."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Fused:
    """A model's fused weights; make them again after the model's parameters change."""

    heads: int
    width: int  # of a head, D
    epsilon: float  # of the norms
    embedding: Tensor
    padding_id: int | None  # read as any other token, but its embedding learns nothing from being read
    layers: list[Layer]
    norm: Tensor
    turns: Tensor  # [positions, D / 2] complex: the factor by which each pair of a query or key is turned

    def leaves(self) -> tuple["Fused", list[tuple[Tensor, Tensor]]]:
        """The same weights as leaves of their own, and (computed, leaf) of each: gradients reach the model's
        parameters when the leaves' are sent on, once for all that was computed with them."""
        pairs: list[tuple[Tensor, Tensor]] = []

        def leaf(weight: Tensor) -> Tensor:
            if not weight.requires_grad:
                return weight
            pairs.append((weight, weight.detach().requires_grad_()))
            return pairs[-1][1]

        layers = [Layer(**{name: leaf(value) for name, value in vars(layer).items()}) for layer in self.layers]
        return replace(self, layers=layers), pairs


def recognised(model: nn.Module) -> bool:
    """Whether this module is known to equal a plain Llama, or a backbone to be one's, of its configuration."""
    if type(model).__name__ not in ("LlamaForCausalLM", "LlamaModel") or not all(map(_is_plain, model.modules())):
        return False
    config: Any = model.config
    decoder = _decoder(model)
    parameters = list(decoder.parameters())
    num_head = 0 if config.tie_word_embeddings else decoder.embed_tokens.weight.numel()
    first: Any = decoder.layers[0]
    attention = first.self_attn
    return (
        config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in _ROTARY
        and config.num_key_value_heads == config.num_attention_heads
        and attention.o_proj.bias is None
        and all(p.bias is None for p in (first.mlp.gate_proj, first.mlp.up_proj, first.mlp.down_proj))
        and attention.head_dim % 2 == 0
        and {p.dtype for p in model.parameters()} in ({torch.float32}, {torch.float64})
        and sum(p.numel() for p in parameters) + num_head <= MAX_PARAMETERS
        and (parameters[0].is_meta or not torch.is_autocast_enabled(parameters[0].device.type))
    )


def fuse(model: nn.Module, length: int) -> Fused:
    """The weights of a recognised model or backbone, for rows of `length` tokens, with gradients."""
    decoder, config = _decoder(model), _decoder(model).config
    embedding, width = decoder.embed_tokens, decoder.layers[0].self_attn.head_dim
    with torch.no_grad():
        angles = decoder.rotary_emb(embedding.weight, torch.arange(length, device=embedding.weight.device)[None])
    turns = torch.complex(*(part[0, :, : width // 2].contiguous() for part in angles))

    def paired(rows: Tensor) -> Tensor:
        """Rows of all heads in the order 0, D/2, 1, D/2 + 1, ...: transformers turns number i with number i + D/2."""
        return rows.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).reshape(rows.shape)

    layers = []
    for layer in decoder.layers:
        queries, keys, values = (getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv")
        qkv = torch.cat([paired(queries) * width**-0.5, paired(keys), values]) * layer.input_layernorm.weight
        gate_up = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
        gate_up = gate_up * layer.post_attention_layernorm.weight
        weights = qkv, layer.self_attn.o_proj.weight, gate_up, layer.mlp.down_proj.weight
        layers.append(Layer(*(weight.t() for weight in weights)))
    return Fused(
        config.num_attention_heads, width, config.rms_norm_eps, embedding.weight, embedding.padding_idx, layers,
        decoder.norm.weight, turns,
    )  # fmt: skip


def rotate(pairs: Tensor, turns: Tensor) -> Tensor:
    """`pairs` [..., D] turned by `turns` [..., D / 2]."""
    return torch.view_as_real(torch.view_as_complex(pairs.unflatten(-1, (-1, 2))) * turns).flatten(-2)


def normalise(x: Tensor, epsilon: float) -> Tensor:
    """`x` over the root of its mean square in the last axis; without gradient (`hidden_states` has one)."""
    return x * _reciprocal_root(x, epsilon)


def hidden_states(
    model: Fused,
    tokens_RC: Tensor,
    positions: Tensor,
    past: list[States] | None = None,
    filled_RT: Tensor | None = None,
) -> tuple[Tensor, list[States]]:
    """([R, C, H] last hidden states, keys and values per layer), with gradients.

    `positions` [R or 1, C] are the tokens'. Token c of a row reads the tokens up to c and its row of `past`,
    [R, heads, T, D] each, where `filled_RT` is True (None: everywhere).
    """
    (rows, columns), turns = tokens_RC.shape, model.turns[positions]
    heads, epsilon = model.heads, model.epsilon
    causal = torch.ones(columns, columns, dtype=torch.bool, device=tokens_RC.device).tril()[None]
    if past is not None:
        if filled_RT is None:
            before = causal.new_ones(1, columns, past[0][0].shape[2])
        else:
            before = filled_RT[:, None].expand(-1, columns, -1)
        causal = torch.cat([before, causal.expand(len(before), -1, -1)], dim=2)
    # [R or 1, 1, C, T + C]: a term of the scores, minus infinity where a token must not be read
    bias = torch.zeros(causal.shape, dtype=model.embedding.dtype, device=causal.device)
    bias = bias.masked_fill_(~causal, -torch.inf)[:, None]
    x = F.embedding(tokens_RC.flatten(), model.embedding, model.padding_id)
    states: list[States] = []
    for i, layer in enumerate(model.layers):
        parts = torch.mm(_Normalise.apply(x, epsilon), layer.qkv).view(rows, columns, -1, model.width)
        turned, values = parts.split([2 * heads, heads], dim=2)
        queries, keys = rotate(turned, turns[:, :, None]).transpose(1, 2).split(heads, dim=1)
        values = values.transpose(1, 2)
        states.append((keys, values))
        if past is not None:
            keys, values = torch.cat([past[i][0], keys], dim=2), torch.cat([past[i][1], values], dim=2)
        x = torch.addmm(x, _attention(queries, keys, values, bias).transpose(1, 2).reshape(len(x), -1), layer.out)
        gate, up = torch.mm(_Normalise.apply(x, epsilon), layer.gate_up).chunk(2, dim=-1)
        x = torch.addmm(x, F.silu(gate) * up, layer.down)
    return _Normalise.apply(x, epsilon).view(rows, columns, -1) * model.norm, states


def _attention(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """[R, heads, C, D]; plain products for short rows: 55 to 75 % of the time of the library's kernel on a CPU."""
    rows, heads, columns, width = queries.shape
    if keys.shape[2] > _SHORT:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=1.0)
    bias = bias[:, 0] if len(bias) == 1 else bias.expand(-1, heads, -1, -1).flatten(0, 1)
    queries, keys, values = (x.reshape(rows * heads, -1, width) for x in (queries, keys, values))
    scores = torch.baddbmm(bias, queries, keys.transpose(1, 2))
    return torch.bmm(torch.softmax(scores, dim=-1), values).view(rows, heads, columns, width)


class _Normalise(torch.autograd.Function):
    """`normalise` with its gradient in one pass; saves what it returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float) -> Tensor:
        root = _reciprocal_root(x, epsilon)
        result = x * root
        ctx.save_for_backward(result, root)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        result, root = ctx.saved_tensors
        share = (gradient * result).mean(dim=-1, keepdim=True)
        return torch.addcmul(gradient, result, share, value=-1).mul_(root), None


def _reciprocal_root(x: Tensor, epsilon: float) -> Tensor:
    """[..., 1]: one over the root of the mean square of the last axis."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (norm * norm).div_(x.shape[-1]).add_(epsilon).rsqrt_()


def _decoder(model: nn.Module) -> Any:
    """The backbone of a recognised model, which may be all that there is."""
    return getattr(model, "model", model)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is of a class known here, and no hook changes its input or output."""
    kind = type(module)
    activation = kind.__module__ == "transformers.activations" and kind.__name__ == "SiLUActivation"
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return (kind.__module__ == _LLAMA or activation or kind in _PLAIN) and not hooked


class LeanDecoder:
    """Decodes one batch under `torch.inference_mode`, with the model's weights at the time of construction."""

    def __init__(self, model: nn.Module, capacity: int):
        """`capacity` is the number of tokens, prompt and completion, that a row can have."""
        fused = fuse(model, capacity)
        layers = [Layer(*(x.contiguous() for x in vars(layer).values())) for layer in fused.layers]
        self.model = replace(fused, layers=layers)
        self.head = (model.get_output_embeddings().weight * self.model.norm).t().contiguous()  # pyright: ignore
        self.capacity = capacity

    def prefill(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """[P, V] logits after the left-padded prompts, [P, T] with a mask that is False for padding."""
        model, (rows, width), heads = self.model, tokens.shape, self.model.heads
        self.length = width
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        turns = model.turns[positions][:, None]
        allowed = torch.ones(width, width, dtype=torch.bool, device=mask.device).tril() & mask[:, None, None, :]
        allowed |= torch.eye(width, dtype=torch.bool, device=mask.device)  # a padding token reads itself: no NaN
        x = model.embedding[tokens.flatten()]
        self.cache = x.new_empty(len(model.layers), 2, rows, heads, self.capacity, model.width)
        for layer, cache in zip(model.layers, self.cache, strict=True):
            parts = _project(model, x, layer).view(rows, width, -1, model.width).transpose(1, 2)
            cache[0, :, :, :width] = rotate(parts[:, heads : 2 * heads], turns)
            cache[1, :, :, :width] = parts[:, 2 * heads :]
            queries, (keys, values) = rotate(parts[:, :heads], turns), cache[..., :width, :]
            read = F.scaled_dot_product_attention(queries, keys, values, attn_mask=allowed, scale=1.0)
            x = _finish(model, x, read.transpose(1, 2).reshape(len(x), -1), layer)
        self.positions, self.bias = positions[:, -1], None
        if not bool(mask.all()):  # a term of every column's score, minus infinity for padding
            bias = x.new_zeros(rows, self.capacity)
            bias[:, :width].masked_fill_(~mask, -torch.inf)
            self.bias = bias[:, None, None]
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
        model, rows, heads = self.model, len(tokens), self.model.heads
        start, self.length = self.length, self.length + 1
        self.positions = self.positions + 1
        turns = model.turns[self.positions][:, None]
        bias = None if self.bias is None else self.bias[..., : self.length].expand(-1, heads, -1, -1).flatten(0, 1)
        x = F.embedding(tokens, model.embedding)
        for layer, (keys, values) in zip(model.layers, self.cache, strict=True):
            parts = _project(model, x, layer)
            keys[:, :, start] = rotate(parts[:, heads : 2 * heads], turns)
            values[:, :, start] = parts[:, 2 * heads :]
            queries = rotate(parts[:, :heads], turns).view(rows * heads, 1, model.width)
            seen = keys.flatten(0, 1)[:, : self.length].transpose(1, 2)
            scores = torch.bmm(queries, seen) if bias is None else torch.baddbmm(bias, queries, seen)
            read = torch.bmm(torch.softmax(scores, dim=-1), values.flatten(0, 1)[:, : self.length])
            x = _finish(model, x, read.view(rows, -1), layer)
        return self._logits(x)

    def select(self, lines: Tensor) -> None:
        """Keep these lines. A line that stays in its place is not touched; others must come from beyond the end."""
        count = len(lines)
        places = (lines != torch.arange(count, device=lines.device)).nonzero()[:, 0]
        filled = self.cache[..., : self.length, :]
        filled[:, :, places] = filled[:, :, lines[places]]
        self.cache = self.cache[:, :, :count]
        self.positions = self.positions[lines]
        if self.bias is not None:
            self.bias = self.bias[lines]

    def _logits(self, x: Tensor) -> Tensor:
        return torch.mm(normalise(x, self.model.epsilon), self.head)


def _project(model: Fused, x: Tensor, layer: Layer) -> Tensor:
    """[N, 3 heads, D]: queries, keys and values, not yet rotated."""
    return torch.mm(normalise(x, model.epsilon), layer.qkv).view(len(x), -1, model.width)


def _finish(model: Fused, x: Tensor, read: Tensor, layer: Layer) -> Tensor:
    """`x` plus the output of attention, [N, heads * D], and then of the feed-forward part, in place."""
    x.addmm_(read, layer.out)
    gate, up = torch.mm(normalise(x, model.epsilon), layer.gate_up).chunk(2, dim=-1)
    return x.addmm_(F.silu(gate).mul_(up), layer.down)
