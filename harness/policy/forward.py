"""Computes log-probs, values and hidden states of a batch; the only place where logits are shifted onto tokens.

Column t of every `_BT` tensor describes token t of its row; the logits that produced it stand in column t - 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.utils.checkpoint import checkpoint

from ..devices import ranks
from ..devices.sharding import is_sharded, under_hooks
from ..interfaces import Distribution
from ..settings.run import Optimizer
from . import fused_llama
from .library import given_cache, grouped_attention, lean_passes
from .lora import around_frozen

LOGITS_BYTES = {"cuda": 2**29, "cpu": 2**27}  # most bytes of logits that one product with the language-model head makes
BLOCK_BYTES = {"cuda": 2**27, "cpu": 2**24}  # of them in float32 that become log-probs at once, with 4 such tensors
BLOCK_ROWS = 2**13  # rows of the head's weights whose gradient comes at once where it is of another type
PASS_BYTES = 2**28  # of logits of a pass on a CPU, where it keeps them all
KEPT_BYTES = 2**30  # most bytes of logits that a pass keeps for its backward pass; more is computed again there
SAVED = 64  # fewest prompt tokens not read again that are worth a pass over what all prompts begin with
_COUNT_COLUMNS = ("mpt", "gpt_neo")  # models that count distances in cache columns, where shorter prompts leave gaps


def microbatch_tokens(settings: Optimizer, device: torch.device, vocabulary: int = 1) -> int:
    """Padded tokens in one forward pass that keeps logits of this `vocabulary` (1: none): short passes stay in a
    processor's caches, long ones fill a GPU."""
    few = max(1, min(1024, PASS_BYTES // (4 * vocabulary)))
    return settings.tokens_per_microbatch or (8192 if device.type == "cuda" else few)


def prompt_tokens(settings: Optimizer, device: torch.device) -> int:
    """Padded tokens of prompts that are read at once. Of a large micro-batch a fourth, because what a pass over prompts
    keeps for its gradient stays beside what a micro-batch of their completions keeps."""
    most = microbatch_tokens(settings, device)
    return min(most, max(1024, most // 4))


def hidden_states(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    """[B, T, H] last hidden states of a causal language model, or of a backbone alone, for right-padded rows, without a
    mask: causal attention never looks at the padding on the right, and positions start at 0."""
    return trunk_pass(model, input_ids=tokens_BT, use_cache=False).last_hidden_state


def trunk_pass(model: nn.Module, **given: Any) -> Any:
    """What the model's backbone returns, by passes that keep less for gradients than the library's; by the library's
    where a backward pass computes them again, outside of these contexts."""
    if _is_recomputing(model):
        return backbone(model)(**given)
    with grouped_attention(model), lean_passes(model):
        return backbone(model)(**given)


def backbone(model: nn.Module) -> Any:
    """The part of a causal language model that turns token ids into hidden states; a backbone is its own."""
    found: Any = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model  # pyright: ignore
    parts = (part for part in model.children() if hasattr(part, "get_decoder"))
    return found if found is not model else next(parts, model)


def output_logits(model: nn.Module, hidden_NH: Tensor, product_NV: Tensor | None = None) -> Tensor:
    """[N, V] logits of last hidden states by the model's own forward pass, with its scale, soft cap and bias: the
    states replace the output of its backbone in that pass, `product_NV` its head's."""
    tokens = torch.zeros(1, len(hidden_NH), dtype=torch.int64, device=hidden_NH.device)
    head: Any = model.get_output_embeddings()  # pyright: ignore
    known = nullcontext() if product_NV is None else _answering(head, lambda _: product_NV[None])
    with _answering(backbone(model), lambda *_, **__: _States((hidden_NH[None],))), known:
        return model(input_ids=tokens, use_cache=False).logits[0]


@contextmanager
def _answering(module: Any, answer: Callable[..., Any]) -> Iterator[None]:
    """Inside the context, where it must be called once, the module does `answer` instead of its own forward pass."""
    calls = 0

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return answer(*given, **named)

    assert "forward" not in vars(module), "an earlier pass did not end, or a library has put its own in this place"
    module.forward = counted
    try:
        yield
    finally:
        del module.forward
    assert calls == 1, f"the forward pass of the model called its {type(module).__name__} {calls} times"


class _States(tuple[Tensor]):
    """The output of a backbone: hidden states, and None for any other field that a forward pass may read."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


def recomputes(model: nn.Module) -> bool:
    """Whether a training pass of the model computes activations again in its backward pass."""
    return any(getattr(part, "gradient_checkpointing", False) for part in model.modules())


def _is_recomputing(model: nn.Module) -> bool:
    return model.training and recomputes(model)  # in training mode alone


def keeps_keys_and_values(model: nn.Module, *, windows: bool = True) -> bool:
    """Whether the model keeps nothing of earlier tokens but keys and values; with `windows` some only of a window.
    False for recurrent states (Mamba, linear attention), custom caches, and models without a cache."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    layers = DynamicCache(config=model.config).layers  # pyright: ignore
    return (
        all(type(layer) is DynamicLayer or (windows and type(layer) is DynamicSlidingWindowLayer) for layer in layers)
        and not getattr(model, "_is_stateful", False)
        and bool(given_cache(model, None))
    )


@under_hooks
def token_logprobs(
    model: nn.Module,
    tokens_BT: Tensor,
    mask_BT: Tensor,
    temperature: float,
    hidden_NH: Tensor | None = None,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies), both [B, T] nats, at least float32: of the tokens in `mask_BT`, and 0 elsewhere.

    They come from the model's own forward pass. Its language-model head runs on masked positions alone, so that
    [B, T, V] never exists. `hidden_NH` are the `completion_states`, if known. Logits are divided by `temperature`
    (taken as 1 when it is 0), as the sampler does. Entropies carry a gradient only if asked.
    """
    hidden_NH = completion_states(model, tokens_BT, mask_BT) if hidden_NH is None else hidden_NH
    targets_N = tokens_BT[:, 1:][mask_BT[:, 1:]]
    logprobs, entropies = state_logprobs(model, hidden_NH, targets_N, temperature, entropy_gradient=entropy_gradient)
    return _scatter(logprobs, mask_BT), _scatter(entropies, mask_BT)


MEASURES: dict[Distribution, Callable[[Tensor], Tensor]] = {
    "entropy": lambda logits: torch.special.entr(logits.softmax(-1)).sum(-1),
    # KL(uniform || policy) in nats, uniform over all V logits of the head
    "uniform_kl": lambda logits: logits.logsumexp(-1) - logits.mean(-1) - math.log(logits.shape[-1]),
    "collision": lambda logits: logits.softmax(-1).square().sum(-1),
}


@under_hooks
def token_measure(
    model: nn.Module, hidden_NH: Tensor, mask_BT: Tensor, temperature: float, name: Distribution
) -> Tensor:
    """[B, T]: a measure of the distributions after the states, from which the tokens in `mask_BT` came, with logits as
    `token_logprobs` has them; 0 elsewhere."""
    parts = hidden_NH.split(block_tokens(len(model.get_output_embeddings().weight), hidden_NH.device))  # pyright: ignore
    logits = (_at_least_float32(output_logits(model, part)) / (temperature or 1.0) for part in parts)
    return _scatter(torch.cat([MEASURES[name](part) for part in logits]), mask_BT)


def block_tokens(vocabulary: int, device: torch.device) -> int:
    """Completion tokens whose logits become log-probs at once."""
    return max(1, BLOCK_BYTES[device.type] // (4 * vocabulary))


def chunk_tokens(vocabulary: int, device: torch.device, dtype: torch.dtype) -> int:
    """Completion tokens in one product with the head: reading its weights is then a small part of the work."""
    return max(1, LOGITS_BYTES[device.type] // (dtype.itemsize * vocabulary))


def is_recomputed(tokens: int, vocabulary: int) -> bool:
    """Whether the backward pass of a pass over that many completion tokens computes the logits again."""
    return 4 * tokens * vocabulary > KEPT_BYTES


def state_logprobs(
    model: nn.Module, hidden_NH: Tensor, targets_N: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies), both [N] nats, of the tokens after the states, as `token_logprobs` has them."""
    head: Any = model.get_output_embeddings()  # pyright: ignore
    vocabulary = len(head.weight)
    block = block_tokens(vocabulary, hidden_NH.device)
    again = torch.is_grad_enabled() and is_recomputed(len(targets_N), vocabulary)

    def score(hidden_NH: Tensor, targets_N: Tensor, product_NV: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits = _at_least_float32(output_logits(model, hidden_NH, product_NV)) / (temperature or 1.0)
        all_logprobs = F.log_softmax(logits, dim=-1)
        logprobs = all_logprobs.gather(-1, targets_N[:, None])[:, 0]
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
        return logprobs, entropies

    if len(targets_N) <= block and not again:
        return score(hidden_NH, targets_N)
    if type(head) is nn.Linear:
        read: list[Tensor] = []  # [1, N, H]: the states as the head reads them, which some models scale
        column = hidden_NH.new_zeros(1, len(hidden_NH), 1)
        with _answering(head, lambda given: read.append(given) or column):
            logits = output_logits(model, hidden_NH)
        is_plain = logits.untyped_storage()._cdata == column.untyped_storage()._cdata  # neither scaled nor capped
        known = hidden_NH.detach()[:block]
        found = _LinearHead.apply(
            lambda product, targets: score(known[: len(targets)], targets, product),
            (block, torch.is_grad_enabled() and not again, entropy_gradient),
            temperature or 1.0 if is_plain and not entropy_gradient else None,
            read[0][0], head.weight, head.bias, targets_N,
        )  # fmt: skip
        return found  # pyright: ignore
    one = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False) if again else score
    found = [one(*part) for part in zip(hidden_NH.split(block), targets_N.split(block), strict=True)]
    logprobs, entropies = zip(*found, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


class _LinearHead(torch.autograd.Function):
    """(log-probs, entropies) that `score` finds in the products of states and head, a block of tokens at a time; with
    `plain`, the temperature of logits that are these products, they and their gradient come in closed form.

    A product takes a chunk of tokens. All are kept for the backward pass (as probabilities if plain), or none, and
    it makes them again; their gradient takes their place. The chunks' gradients of the weights are added up in at least
    float32: in `weight.grad`, if there is one.
    """

    @staticmethod
    def forward(
        ctx: Any, score: Any, settings: Any, plain: float | None, states_NH: Any, weight: Any, bias: Any, targets_N: Any
    ) -> Any:
        block, is_kept, entropy_gradient = settings
        ctx.dtype = F.linear(states_NH[:0], weight[:0]).dtype  # autocast's, where it is on
        ctx.plain, ctx.block, ctx.chunk = plain, block, chunk_tokens(len(weight), weight.device, ctx.dtype)
        ctx.score = score
        if plain is not None:
            ctx.score, score = (partial(_plain_score, temperature=plain, keep=keep) for keep in (True, is_kept))
        found, products = [], []
        with torch.autocast(states_NH.device.type, enabled=False):
            for states, targets in zip(states_NH.split(ctx.chunk), targets_N.split(ctx.chunk), strict=True):
                product = _head_product(ctx.dtype, states, weight, bias)
                found += [score(*part) for part in zip(product.split(block), targets.split(block), strict=True)]
                products += [product] * is_kept
        ctx.save_for_backward(states_NH, weight, bias, targets_N, *products)
        logprobs, entropies = (torch.cat(parts) for parts in zip(*found, strict=True))
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        states_NH, weight, bias, targets_N, *products = ctx.saved_tensors
        is_asked_again = bool(products) and _get_current_graph_task_keep_graph()  # retain_graph
        states_gradient = torch.empty_like(states_NH)
        wanted = [x if needed else None for x, needed in zip((weight, bias), ctx.needs_input_grad[4:6], strict=True)]
        adds = wanted[0] is not None and weight.is_leaf and weight.grad is not None and weight.dtype.itemsize > 2
        sums = [None if x is None else _at_least_float32(torch.zeros_like(x)) for x in wanted[adds:]]
        sums = [weight.grad, *sums] if adds else sums
        columns = (x.split(ctx.chunk) for x in (states_NH, states_gradient, targets_N, *gradients))
        with torch.autocast(states_NH.device.type, enabled=False):
            for i, (given, into, *of_tokens) in enumerate(zip(*columns, strict=True)):
                product = products[i] if products else _head_product(ctx.dtype, given, weight, bias)
                product = product.clone() if is_asked_again else product
                blocks = (x.split(ctx.block) for x in (product, *of_tokens))
                for part, targets, *known in zip(*blocks, strict=True):
                    if ctx.plain is not None:
                        if not products:
                            ctx.score(part, targets)
                        slope = (known[0] / ctx.plain)[:, None].to(part.dtype)
                        part.mul_(-slope).scatter_add_(1, targets[:, None], slope)
                        continue
                    leaf = part.detach().requires_grad_()
                    with torch.enable_grad():
                        found = [x for x in ctx.score(leaf, targets) if x.requires_grad]
                    part.copy_(torch.autograd.grad(found, leaf, known[: len(found)])[0])
                into.copy_(product @ weight.to(ctx.dtype))
                states = given.to(ctx.dtype)
                if sums[0] is not None and sums[0].dtype == ctx.dtype:
                    sums[0].addmm_(product.t(), states)
                elif sums[0] is not None:
                    for rows, columns_NV in zip(sums[0].split(BLOCK_ROWS), product.split(BLOCK_ROWS, 1), strict=True):
                        rows += columns_NV.t() @ states
                if sums[1] is not None:
                    sums[1] += product.sum(0)
        found = [None if x is None else x.to(weight.dtype) for x in sums]
        return None, None, None, states_gradient, None if adds else found[0], found[1], None


def _head_product(dtype: torch.dtype, states_NH: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(states_NH.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _plain_score(logits: Tensor, targets_N: Tensor, temperature: float, keep: bool) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) of the targets under logits / temperature; with `keep`, probabilities replace the logits
    [N, V]."""
    scaled = _at_least_float32(logits)
    scaled = scaled if temperature == 1 else scaled / temperature
    below = torch.sub(scaled, scaled.amax(-1, keepdim=True), out=None if scaled is logits else scaled)
    logprobs = below.gather(-1, targets_N[:, None])[:, 0]
    odds = below.exp()
    total = odds.sum(-1)
    entropies = total.log() - torch.linalg.vecdot(odds, below) / total
    if keep:
        logits.copy_(odds.mul_(total.reciprocal()[:, None]))
    return logprobs - total.log(), entropies


@dataclass
class PromptStates:
    """Keys and values of a batch's distinct prompts, all tokens but the last, which rows of one prompt share.

    `states` holds (keys, values) per layer, each [U, heads, T, width], right-padded; `lengths_U` the tokens of each,
    `prompt_B` the prompt of each row. With gradients the states are leaves: micro-batches add to their gradient, and
    `backward` sends the sum through the prompts once. `computed` pairs each leaf with the tensor that it stands for;
    second come the weights of `lean` (a model that `fused_llama` recognises), to whose gradients the prompts add.
    Each process of a trial reads a part of the prompts and gets the states of all; the leaves' gradients are summed.
    The backward pass of a sharded model's prompts begins at `hidden`, their last hidden states, with a gradient of 0,
    because its hooks gather a layer when the gradient of that layer's output comes.
    """

    states: list[tuple[Tensor, Tensor]]
    computed: list[list[tuple[Tensor, Tensor]]]
    lengths_U: Tensor
    prompt_B: Tensor
    lean: fused_llama.Fused | None = None
    hidden: Tensor | None = None

    def rows(self, index: Tensor) -> PromptStates:
        return replace(self, prompt_B=self.prompt_B[index])

    def backward(self) -> None:
        for computed in self.computed:
            reached = [(x, ranks.own_sum(leaf.grad)) for x, leaf in computed if leaf.grad is not None]
            if reached:
                reached += [] if self.hidden is None else [(self.hidden, torch.zeros_like(self.hidden))]
                torch.autograd.backward([x for x, _ in reached], [gradient for _, gradient in reached])


def can_share_prompts(model: nn.Module) -> bool:
    """Whether rows of one prompt may share its keys and values: no windows, no distances in cache columns."""
    return model.config.model_type not in _COUNT_COLUMNS and keeps_keys_and_values(model, windows=False)  # pyright: ignore


def prompt_states(model: nn.Module, tokens_BT: Tensor, mask_BT: Tensor) -> PromptStates | None:
    """The shared states of the rows' prompts, or None if they are not `shared_prompts` or the model keeps no cache."""
    found = shared_prompts(model, tokens_BT, mask_BT)
    if found is None:
        return None
    prompts_UT, prompt_B = found
    lengths_U = (prompts_UT >= 0).sum(dim=1) - 1
    inputs, lean, weights, hidden = ranks.dealt(prompts_UT[:, :-1].clamp(min=0)), None, [], None
    if not fused_llama.recognised(model):
        shared = int((inputs == inputs[0]).all(dim=0)[:-1].int().cumprod(dim=0).sum())
        apart = (len(inputs) - 1) * shared < SAVED or recomputes(model) or is_sharded(model)
        begun = None if apart else _prompt_pass(model, inputs[:1, :shared])[1]
        hidden, states = _prompt_pass(model, inputs if begun is None else inputs[:, shared:], begun)
        if states is None:
            return None  # the model drops the cache where it recomputes activations
    else:
        lean, weights = fused_llama.fuse(model, tokens_BT.shape[1]).leaves()
        _, states = fused_llama.hidden_states(lean, inputs, torch.arange(inputs.shape[1], device=inputs.device)[None])
    flat = [x for pair in states for x in pair]
    leaves = [ranks.all_dealt(x.detach(), len(prompts_UT)).requires_grad_(x.requires_grad) for x in flat]
    pairs, computed = list(zip(leaves[::2], leaves[1::2], strict=True)), list(zip(flat, leaves, strict=True))
    return PromptStates(pairs, [computed, weights], lengths_U, prompt_B, lean, hidden if is_sharded(model) else None)


def sharing_pays(token: float, pair: float, prompts: float, squares: float) -> bool:
    """Whether it saves operations not to read so many tokens of `prompts` again. The completions then need a mask, and
    without one attention skips half of the pairs of a completion's tokens, of which there are `squares` (the sum of the
    squared lengths). `token` and `pair` are the operations for one of each."""
    return token * prompts > pair * squares / 2


def sharing_pays_in(model: nn.Module, prompts: float, squares: float) -> bool:
    """`sharing_pays` in a model; always in one that `fused_llama` recognises, whose own pass is the faster one."""
    config: Any = model.config.get_text_config()  # pyright: ignore
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weights = sum(p.numel() for p in backbone(model).parameters()) - model.get_input_embeddings().weight.numel()  # pyright: ignore
    pair = 4 * config.num_hidden_layers * config.num_attention_heads * head_width
    return prompts > 0 and (fused_llama.recognised(model) or sharing_pays(2 * weights, pair, prompts, squares))


def shared_prompts(model: nn.Module, tokens_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor] | None:
    """([U, T] prompts, right-padded with -1, [B] the prompt of each row), or None if no rows share a prompt, one has
    less than two tokens, the model cannot share them or it does not pay."""
    if not can_share_prompts(model):
        return None
    starts_B = mask_BT.int().argmax(dim=1)
    lengths = *starts_B.aminmax(), starts_B.sum(), (mask_BT.sum(dim=1) ** 2).sum()
    shortest, width, total, squares = torch.stack(lengths).tolist()  # together: a GPU is waited for
    if shortest < 2:
        return None
    before = torch.arange(width, device=tokens_BT.device) < starts_B[:, None]
    prompts_UT, prompt_B = torch.unique(tokens_BT[:, :width].masked_fill(~before, -1), dim=0, return_inverse=True)
    saved = total * (1 - len(prompts_UT) / len(tokens_BT))
    return (prompts_UT, prompt_B) if sharing_pays_in(model, saved, squares) else None


@under_hooks
def _prompt_pass(
    model: nn.Module, inputs: Tensor, begun: list[tuple[Tensor, Tensor]] | None = None
) -> tuple[Tensor, list[tuple[Tensor, Tensor]] | None]:
    """(the last hidden states, keys and values of each layer, or None if it keeps none), after a beginning of all."""
    rows_U = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
    cache = prompt_cache(model, None if begun is None else PromptStates(begun, [], rows_U, rows_U), keeps=True)
    found = trunk_pass(model, input_ids=inputs, use_cache=not _is_recomputing(model), **given_cache(model, cache))
    states = [layer.first for layer in cache.layers]
    return found.last_hidden_state, None if None in states else states


@under_hooks
def completion_states(
    model: nn.Module, tokens_BT: Tensor, mask_BT: Tensor, prompts: PromptStates | None = None
) -> Tensor:
    """[N, H]: the hidden state before each of the N tokens in `mask_BT`, row by row; `prompts` are not read again."""
    if prompts is None:
        return hidden_states(model, tokens_BT)[:, :-1][mask_BT[:, 1:]]
    lengths_B = prompts.lengths_U[prompts.prompt_B]
    counts_B = mask_BT.sum(dim=1)
    filled = torch.arange(prompts.states[0][0].shape[2], device=tokens_BT.device) < lengths_B[:, None]
    longest, all_filled = torch.stack([counts_B.max(), filled.all()]).tolist()  # together: a GPU is waited for
    offsets = torch.arange(longest, device=tokens_BT.device)
    positions = (lengths_B[:, None] + offsets).clamp(max=tokens_BT.shape[1] - 1)
    inputs = tokens_BT.gather(1, positions)
    if prompts.lean is not None:
        past = [(keys[prompts.prompt_B], values[prompts.prompt_B]) for keys, values in prompts.states]
        hidden, _ = fused_llama.hidden_states(prompts.lean, inputs, positions, past, None if all_filled else filled)
    else:
        hidden = trunk_pass(
            model,
            input_ids=inputs,
            attention_mask=None if all_filled else torch.cat([filled, torch.ones_like(inputs).bool()], dim=1),
            position_ids=positions,
            use_cache=not _is_recomputing(model),
            **given_cache(model, prompt_cache(model, prompts)),
        ).last_hidden_state
    return hidden[offsets < counts_B[:, None]]


def prompt_cache(model: nn.Module, prompts: PromptStates | None, *, keeps: bool = False) -> Any:
    """A cache whose layers begin with the prompt of each row, if any, and store nothing, because a backward pass may
    compute them again; if it `keeps` them, `first` of a layer has the keys and values that it hands out."""
    from transformers.cache_utils import DynamicCache, DynamicLayer
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Shared(DynamicLayer):
        first: tuple[Tensor, Tensor] | None = None

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            handed = key_states, value_states
            if prompts is not None:
                keys, values = cast(Tensor, self.keys)[prompts.prompt_B], cast(Tensor, self.values)[prompts.prompt_B]
                handed = torch.cat([keys, key_states], -2), torch.cat([values, value_states], -2)
            if keeps:
                self.first = self.first or handed
            return handed

    cache: Any = DynamicCache(config=model.config)  # pyright: ignore
    cache.layers = [Shared() for _ in cache.layers]
    for layer, (keys, values) in zip(cache.layers, prompts.states if prompts else (), strict=prompts is not None):
        layer.keys, layer.values, layer.is_initialized = keys, values, True
    for part in model.modules() if _is_recomputing(model) else ():
        if isinstance(part, GradientCheckpointingLayer):
            part._can_checkpoint_with_cache = True  # for the library would pass none to a layer that is computed again
    return cache


class Critic(nn.Module):
    """PPO's value per token: a linear head that starts at zero, on the states of a copy of the policy's backbone, or
    (`shared`) on the policy's own, which its loss then moves too."""

    def __init__(self, policy: nn.Module, *, shared: bool = False):
        super().__init__()
        body = backbone(policy)
        self.backbone = None if shared else around_frozen(body)
        self.head = nn.Linear(policy.config.hidden_size, 1)  # pyright: ignore
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        first, adapted = next(policy.parameters()), any(not p.requires_grad for p in body.parameters())
        self.head.to(device=first.device, dtype=torch.float32 if adapted else first.dtype)

    def forward(self, mask_BT: Tensor, hidden_NH: Tensor) -> Tensor:
        """[B, T], at least float32: the value of the state in which each token in `mask_BT` was chosen, 0 elsewhere;
        `hidden_NH` are the `completion_states` of its own backbone, or of the policy."""
        return _scatter(_at_least_float32(self.head(hidden_NH.to(self.head.weight.dtype)))[:, 0], mask_BT)


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _scatter(flat: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.zeros(mask_BT.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask_BT, flat)
