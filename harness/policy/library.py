"""What here rests on the insides of transformers: its import without parts that nothing needs and without progress
bars, which break ours, and a cache and an attention for decoding, through its own interfaces for both; how torch
multiplies by the same weights again and again, and where it lays gradients."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import cache, partial
from importlib import import_module
from inspect import getsource, signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..devices.sharding import is_spread

_for_products: ContextVar[int] = ContextVar("for_products", default=0)  # threads; 0: as many as for all else
LARGE = 2**22  # fewest weights of an embedding whose gradient is made of the rows that were read alone


def missing() -> list[str]:
    """The insides that the installed version lacks and that fast paths lean on, which would be off in silence."""
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.modeling_utils import PreTrainedModel

    used = {"_is_stateful": PreTrainedModel, "_supports_attention_backend": PreTrainedModel}
    used |= {"_can_checkpoint_with_cache": GradientCheckpointingLayer}
    return [f"{owner.__name__}.{name}" for name, owner in used.items() if not hasattr(owner, name)]


def import_generation() -> None:
    """Import transformers' generation and losses without scikit-learn and SciPy.

    Only assisted decoding uses scikit-learn, and only losses of object detection use SciPy. Importing them costs 0.9 s
    and 103 MB, and 0.3 s; they are installed for the importances of searches, for MLflow and for reports.
    """
    utils: Any = import_module("transformers.utils")
    utils.logging.disable_progress_bar()
    if "transformers.generation.candidate_generator" in sys.modules:
        return
    found = {name: getattr(utils, name) for name in ("is_sklearn_available", "is_scipy_available")}
    for name in found:
        setattr(utils, name, lambda: False)
    try:
        import transformers.generation.candidate_generator
        import transformers.loss.loss_utils  # noqa: F401
    finally:
        for name, available in found.items():
            setattr(utils, name, available)


def hold_date() -> None:
    """Let every chat template that asks for today's date get the same one, so that a prompt is the same every day."""
    templates: Any = import_module("transformers.utils.chat_template_utils")
    templates.datetime = SimpleNamespace(now=lambda: datetime(2024, 7, 26))


def given_cache(model: nn.Module, cache: Any) -> dict[str, Any]:
    """The cache as the argument in which the forward pass of the model, or of its backbone, takes it: `cache` from
    transformers 5.24 on. Empty if it takes none; XLM's `cache` is a dict of its own."""
    takes, names = signature(model.forward).parameters, ("past_key_values", "cache")
    return {name: cache for name in names if name in takes and "dict" not in str(takes[name].annotation)}


def decoding_cache(model: nn.Module, capacity: int) -> Any:
    """A cache for texts of at most `capacity` tokens, whose layers write keys and values in place and hand out views.
    The library's own layers copy all of them for every token; those with a window shorter than the texts stay."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    class InPlace(DynamicLayer):
        length, rows = 0, 0

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            new = key_states, value_states
            if not self.is_initialized:
                kind = new[0].device.type  # autocast, where it is on, would cast all of them again for every token
                dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
                self.whole = [x.new_zeros(*x.shape[:2], capacity, x.shape[3], dtype=dtype) for x in new]
                self.rows, self.is_initialized = len(key_states), True
            start, self.length = self.length, self.length + key_states.shape[2]
            for whole, x in zip(self.whole, new, strict=True):
                whole[: self.rows, :, start : self.length] = x
            return self._views()

        def _views(self) -> tuple[Tensor, Tensor]:
            self.keys, self.values = (whole[: self.rows, :, : self.length] for whole in self.whole)
            return self.keys, self.values

        def get_seq_length(self) -> int:
            return self.length

        def batch_repeat_interleave(self, repeats: int) -> None:
            for i, whole in enumerate(self.whole):
                wide = whole.new_zeros(len(whole), repeats, *whole.shape[1:])
                wide[..., : self.length, :] = whole[:, None, :, : self.length]
                self.whole[i] = wide.flatten(0, 1)
            self.rows *= repeats
            self._views()

        def batch_select_indices(self, indices: Tensor) -> None:
            """Rows that keep their place are not touched; others must come from beyond the new end."""
            self.rows = len(indices)
            moved = (indices != indices.new_tensor(range(self.rows))).nonzero()[:, 0]
            for whole in self.whole:
                whole[moved, :, : self.length] = whole[indices[moved], :, : self.length]
            self._views()

    cache: Any = DynamicCache(config=model.config)  # pyright: ignore
    long = capacity
    cache.layers = [x if getattr(x, "sliding_window", long) < long else InPlace() for x in cache.layers]
    return cache


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside the context all but products of matrices takes one thread: of fewer than a million numbers several take
    longer to begin than one to end."""
    token = _for_products.set(torch.get_num_threads())
    try:
        with _threads(1):
            yield
    finally:
        _for_products.reset(token)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def packed_products(model: nn.Module) -> Iterator[None]:
    """Inside the context, on a CPU, passes without gradient multiply by copies of the linear layers' weights that
    oneDNN lays out once, in autocast's precision if it is on: with few rows plain products take up to twice as long.
    Nothing changes where torch has no oneDNN, as on a Mac."""
    operations: Any = torch.ops.mkldnn
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    precisions = {torch.float32} if torch.backends.mkldnn.is_available() else set[torch.dtype]()
    if precisions and operations._is_mkldnn_bf16_supported():
        precisions.add(torch.bfloat16)

    def packs(part: nn.Module) -> bool:
        known = type(part) is nn.Linear and part.weight.device.type == "cpu" and not is_spread(part.weight)
        return known and (autocast or part.weight.dtype) in precisions

    def packed(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        dtype = autocast or layer.weight.dtype
        bias = None if layer.bias is None else layer.bias.detach().to(dtype)
        weight = operations._reorder_linear_weight(layer.weight.detach().to(dtype))

        def product(given: Tensor) -> Tensor:
            given = given.to(dtype)
            with _threads(_for_products.get()):
                return operations._linear_pointwise(given, weight, bias, "none", [], "")

        return product

    layers: list[Any] = [part for part in model.modules() if packs(part)]
    for layer in layers:
        layer.forward = packed(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Forget the gradients of an optimiser's only group. On a CPU the new ones begin as zeros in one piece of memory:
    pieces that come one by one lie between what passes keep, and leave holes there that are too small for the next.
    AdamW then moves a weight that no token reaches by its moments; elsewhere it leaves it. Weights that lie in another
    order get their own gradient, because torch's fused AdamW reads both in the order they lie in."""
    optimizer.zero_grad()
    whole = [x for x in optimizer.param_groups[0]["params"] if x.device.type == "cpu" and not is_spread(x)]
    for dtype in {x.dtype for x in whole}:
        own = [x for x in whole if x.dtype == dtype and x.is_contiguous()]
        sizes = [-(-x.numel() // 64) * 64 for x in own]  # each begins where torch's own pieces would
        for x, piece in zip(own, torch.zeros(sum(sizes), dtype=dtype).split(sizes), strict=True):
            x.grad = piece[: x.numel()].view_as(x)


@contextmanager
def lean_passes(model: nn.Module) -> Iterator[None]:
    """Inside the context passes on a CPU keep less for their gradients, which are the same: norms and the products of
    gated feed-forward parts are made again from their inputs, for 2 to 5 % more time. No product of matrices is. The
    gradient of a large embedding is made of the rows that were read alone. A GPU, where the time for it has not been
    measured, keeps all."""
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    applies = torch.is_grad_enabled() and next(model.parameters()).device.type == "cpu"
    lean: dict[Any, Any] = {}
    for part in model.modules() if applies else ():
        if type(part).__name__.endswith("RMSNorm"):
            lean[part] = partial(again, part.forward)
        elif _is_gated(type(part)):
            lean[part] = partial(_gated, part, again)
        elif type(part) is nn.Embedding and not (
            part.weight.numel() < LARGE or part.max_norm or part.scale_grad_by_freq or is_spread(part.weight)
        ):
            lean[part] = partial(_Embedded.apply, part.weight, part.padding_idx)
    for part, forward in lean.items():
        part.forward = forward
    try:
        yield
    finally:
        for part in lean:
            del part.forward


class _Embedded(torch.autograd.Function):
    """Rows of an embedding. If its weights have a gradient, that of the rows is added there; torch's own way makes a
    tensor of the size of all weights each time."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, padding: int | None, ids: Tensor) -> Tensor:
        ctx.padding = -1 if padding is None else padding
        ctx.save_for_backward(weight, ids)
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight, ids), (gradient,) = ctx.saved_tensors, gradients
        summed = torch.ops.aten.embedding_dense_backward  # the gradients of each index, in their order
        if weight.grad is None:
            return summed(gradient, ids, len(weight), ctx.padding, False), None, None
        read, places = ids.unique(return_inverse=True)
        rows = summed(gradient, places, len(read), -1, False)
        weight.grad.index_add_(0, read, rows.masked_fill_((read == ctx.padding)[:, None], 0))
        return None, None, None


@cache
def _is_gated(kind: Any) -> bool:
    """Whether a class is a feed-forward part as most of transformers' are written."""
    code = "self.down_proj(self.act_fn(self.gate_proj(x))*self.up_proj(x))"
    return kind.__name__.endswith("MLP") and code in "".join(getsource(kind.forward).split())


def _gated(part: Any, again: Any, x: Tensor) -> Tensor:
    def product(gate: Tensor, up: Tensor) -> Tensor:
        return part.act_fn(gate) * up

    sides = part.gate_proj(x), part.up_proj(x)
    if type(part.down_proj) is nn.Linear:
        return again(lambda gate, up: part.down_proj(product(gate, up)), *sides)
    return part.down_proj(again(product, *sides))  # an adapter's, of which a part would be multiplied again


@contextmanager
def grouped_attention(model: nn.Module) -> Iterator[None]:
    """Inside the context, where the model's attention is SDPA's, `_attend` is, which repeats no keys."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("grouped", _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("grouped", sdpa_mask)
    config: Any = model.config
    found = config._attn_implementation
    exchanges = found == "sdpa" and getattr(model, "_supports_attention_backend", False)
    config._attn_implementation = "grouped" if exchanges else found
    try:
        yield
    finally:
        config._attn_implementation = found


def _with_room(key: Tensor, value: Tensor) -> list[Tensor]:
    """[R * heads, T or more, D]: keys and values, with the room after them that an `InPlace` cache has if oneDNN would
    copy them without it for each product, and if they fill a fourth of it."""
    whole, (rows, heads, length, width) = key.stride(1), key.shape
    lies_so = key.stride() == value.stride() == (heads * whole, whole, width, 1)
    lies_so &= key.storage_offset() == value.storage_offset() == 0 and whole <= 4 * length * width
    if key.device.type == "cpu" and key.dtype == value.dtype != torch.float32 and lies_so:
        return [x.as_strided((rows * heads, whole // width, width), (whole, width, 1)) for x in (key, value)]
    return [x.flatten(0, 1) for x in (key, value)]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """([R, T, heads, D], None): attention without copies of the keys that query heads share. Of a single token those
    heads are the rows of one product; of more on a CPU SDPA's own kernel takes them beside a mask. transformers' way
    else (its own knows them without a mask), for a mask by head and for a term by position."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    by_head = attention_mask is not None and attention_mask.shape[1] > 1
    is_single, is_masked_on_cpu = query.shape[2] == 1, attention_mask is not None and query.device.type == "cpu"
    has_more_terms = by_head or given.get("dropout") or given.get("position_bias") is not None
    if has_more_terms or not (is_single or is_masked_on_cpu):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    if not is_single:
        attend = partial(nn.functional.scaled_dot_product_attention, scale=given.get("scaling"), enable_gqa=True)
        return attend(query, key, value, attention_mask).transpose(1, 2), None
    (rows, heads, _, width), shared = query.shape, key.shape[1]
    scale = width**-0.5 if given.get("scaling") is None else given["scaling"]
    grouped = (query * scale).view(rows * shared, heads // shared, width)
    is_mask, length = attention_mask is None or attention_mask.dtype == torch.bool, key.shape[2]
    keys, values = _with_room(key, value) if is_mask else (key.flatten(0, 1), value.flatten(0, 1))
    with _threads(_for_products.get()):
        scores = torch.bmm(grouped, keys.transpose(1, 2)).view(rows, shared, heads // shared, -1)
    scores[..., length:] = -torch.inf
    if attention_mask is not None:
        if is_mask:
            scores[..., :length].masked_fill_(~attention_mask, -torch.inf)
        else:
            scores = scores + attention_mask
    weights = scores.softmax(-1).flatten(0, 1).to(value.dtype)
    with _threads(_for_products.get()):
        read = torch.bmm(weights, values)
    return read.view(rows, 1, heads, -1), None
