"""Counts the floating-point operations of a run by formula, from the model's shape and the tokens that it reads.

A weight matrix takes 2 operations per weight and token; attention takes 4 D per layer, head and (token, key) pair
(Kaplan et al. 2020, arXiv:2001.08361, table 1; Chowdhery et al. 2022, arXiv:2204.02311, appendix B). The gradient of a
product takes two more products: one for its input and one for its weights, which frozen weights save.

Passes are counted as they run: a prompt is prefilled once and read once for all its rows, the language-model head runs
only on completion tokens, and gradient checkpointing computes layers twice. A mask saves nothing, as in PyTorch's
FlopCounterMode. Every prompt counts whole, although an engine may read what all begin with once, so that equal budgets
do not depend on the engine. Not counted: padding, a cache's room, operations that are not matrix products (norms,
softmax, optimiser), the regression of a critic's head, checks of engine and weights.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from ..data import Group
from ..devices.sharding import is_sharded, layers
from ..settings.run import RunSpec
from .forward import backbone, can_share_prompts, is_recomputed, keeps_keys_and_values, recomputes, sharing_pays
from .fused_llama import recognised
from .model import empty_model, model_config

Lengths = Sequence[tuple[int, Sequence[int]]]  # for each prompt, its tokens and the tokens of each completion
_KEYS = re.compile(r"k_proj|v_proj|c_attn|qkv|query_key_value")  # weights that make keys and values
_INPUT = re.compile(f"q_proj|{_KEYS.pattern}")  # weights that read a layer's input
_END = re.compile(r"down_proj|fc2|mlp\.c_proj|dense_4h_to_h")  # products that nothing needs again in the backward pass


class Work(NamedTuple):
    """Counts of passes: tokens, (token, key) pairs of attention, and tokens that reach the head; or the operations for
    one of each."""

    tokens: float = 0.0
    pairs: float = 0.0
    headed: float = 0.0

    def plus(self, other: "Work") -> "Work":
        return Work(self.tokens + other.tokens, self.pairs + other.pairs, self.headed + other.headed)

    def at(self, each: "Work") -> float:
        """The operations of this work where one of each takes `each`."""
        return each.tokens * self.tokens + each.pairs * self.pairs + each.headed * self.headed


@dataclass(frozen=True)
class Costs:
    """Operations of a model's passes.

    forward, backward   operations of a pass and of its gradient
    keys                of the gradient of a pass over prompts, which begins at the keys and values of the last layer,
                        or, if a model is sharded, at its last hidden states
    again               of the passes that gradient checkpointing repeats
    adapter             the share of a token in `forward` that is an adapter's
    reference           operations of the reference, if it is another model
    sampler             operations of the model that samples, if it is another one
    scorers             operations of the rewards' own models
    """

    forward: Work
    backward: Work
    keys: Work
    again: Work
    adapter: int
    vocabulary: int
    can_share: bool
    is_lean: bool
    recomputes: bool
    reference: "Costs | None" = None
    sampler: "Costs | None" = None
    scorers: "tuple[Costs, ...]" = ()

    @classmethod
    def of(cls, policy: nn.Module) -> "Costs":
        """The costs of a policy with its adapter. ValueError for a model that the formula does not fit: a mixture of
        experts, latent attention, or states other than keys and values."""
        config: Any = policy.config
        unlike = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")
        if any(getattr(config, name, None) for name in unlike) or not keeps_keys_and_values(policy):
            raise ValueError(f"the operations of a {config.model_type} cannot be counted by formula")
        body: Any = backbone(policy)
        embeddings = {id(m.weight) for m in body.modules() if isinstance(m, nn.Embedding)}
        weights = {n: p for n, p in body.named_parameters() if p.dim() == 2 and id(p) not in embeddings}
        every = list(layers(policy))
        first, last = ({id(p) for p in layer.parameters()} for layer in (every[0], every[-1]))
        read_by_keys = _INPUT if recognised(policy) else _KEYS  # there queries, keys and values are one product
        adapted, computes_again = any(".lora_" in name for name in weights), recomputes(policy)
        token = gradient = keys_gradient = again = adapter = 0
        for name, p in weights.items():
            product = 2 * p.numel()
            is_adapter = ".lora_" in name
            # with checkpointing the embeddings' output asks for a gradient
            reads_frozen = (
                adapted and not computes_again and id(p) in first and _INPUT.search(name) and ".lora_B" not in name
            )
            needed = (0 if reads_frozen else product) + (product if is_adapter or not adapted else 0)
            token += product
            again += 0 if _END.search(name) and not is_adapter and ".base_layer" not in name else product
            adapter += product if is_adapter else 0
            gradient += needed
            keys_gradient += 0 if id(p) in last and not read_by_keys.search(name) else needed
        head = policy.get_output_embeddings().weight  # pyright: ignore
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pair, last_pairs = (4 * config.num_attention_heads * width * count for count in (len(every), 2))
        return cls(
            forward=Work(token, pair, 2 * head.numel()),
            backward=Work(gradient, 2 * pair, (2 if adapted else 4) * head.numel()),
            keys=Work(gradient, 2 * pair) if is_sharded(policy) else Work(keys_gradient, 2 * pair - last_pairs),
            again=Work(again, pair),
            adapter=adapter,
            vocabulary=len(head),
            can_share=can_share_prompts(policy),
            is_lean=recognised(policy),
            recomputes=computes_again,
        )

    @classmethod
    def named(cls, model: str) -> "Costs":
        """The costs of a model by its name in a spec; reads no weights."""
        return cls.of(empty_model(model_config(model)))

    def shares(self, rows: Lengths) -> bool:
        """Whether rows of a prompt read it once."""
        again = sum(prompt * (len(counts) - 1) for prompt, counts in rows)
        squares = sum(count**2 for _, counts in rows for count in counts)
        token, pair, _ = self.forward
        return self.can_share and (self.is_lean or sharing_pays(token, pair, again, squares))

    @property
    def frozen(self) -> "Costs":
        """The costs of the model without its adapter."""
        return replace(self, forward=self.forward._replace(tokens=self.forward.tokens - self.adapter))


def lengths(groups: Sequence[Group]) -> Lengths:
    return [(len(g.prompt_token_ids), [len(r.token_ids) for r in g.rollouts]) for g in groups]


def parted(rows: Lengths, apart: Sequence[bool]) -> tuple[Lengths, Lengths]:
    """The completions that are `apart` (in order; none, if it is empty) and the others, each with their prompts."""
    flags = iter(apart or [False] * sum(len(counts) for _, counts in rows))
    marked = [(prompt, [(next(flags), count) for count in counts]) for prompt, counts in rows]

    def those(wanted: bool) -> Lengths:
        found = [(prompt, [count for flag, count in counts if flag == wanted]) for prompt, counts in marked]
        return [(prompt, counts) for prompt, counts in found if counts]

    return those(True), those(False)


def sampled(costs: Costs, drawn: Lengths) -> float:
    """Operations to sample these completions: each prompt is read once, and each completion token but the last once."""
    work = Work()
    for prompt, completions in drawn:
        work = work.plus(Work(prompt, prompt**2, 1))
        for count in completions:
            steps = count - 1  # token i reads the prompt, the i tokens before it, and itself
            work = work.plus(Work(steps, steps * prompt + steps * count / 2, steps))
    return work.at(costs.forward)


def scored(costs: Costs, rows: Lengths, *, share: bool, headed: bool = True) -> float:
    """Operations of one pass without gradient over these rows."""
    if not rows:
        return 0.0
    prompts, completions = _read(rows, share and costs.shares(rows), headed)
    return prompts.plus(completions).at(costs.forward)


def learned(
    costs: Costs,
    rows: Lengths,
    spec: RunSpec,
    *,
    share: bool,
    headed: bool = True,
    batch_tokens: int = 0,
    has_gradient: bool = True,
) -> float:
    """Operations of all updates on these rows, in micro-batches of `batch_tokens` padded tokens. m rows of a minibatch,
    drawn from P prompts of G rows, B in all, have P (1 - C(B - G, m) / C(B, m)) prompts on average."""
    if not rows:
        return 0.0
    epochs, parts = spec.optimizer.num_inner_epochs, spec.optimizer.num_minibatches
    size = sum(len(completions) for _, completions in rows)
    group, part = size // len(rows), size // parts
    prompts, completions = _read(rows, share and costs.shares(rows) and part > 1, headed)
    met = 1 - math.comb(size - group, part) / math.comb(size, part)
    prompts = Work(*(parts * met * count for count in prompts))
    total = prompts.plus(completions).at(costs.forward)
    if not has_gradient:
        return epochs * total
    total = total + completions.at(costs.backward) + prompts.at(costs.keys)
    if costs.recomputes:
        total += completions.at(costs.again) + prompts.at(costs.again)
    ends = completions.headed / sum(prompt + sum(counts) / len(counts) for prompt, counts in rows for _ in counts)
    if is_recomputed(int(min(batch_tokens * ends, completions.headed / parts)), costs.vocabulary):
        total += costs.forward.headed * completions.headed
    return epochs * total


def fitted(costs: Costs, rows: Lengths, *, headed: bool = True) -> float:
    """Operations of one pass over these rows in a cold start or in a fit of a reward model, which train all weights."""
    return 3 * _read(rows, False, headed)[1].at(costs.frozen.forward)


def _read(rows: Lengths, share: bool, headed: bool) -> tuple[Work, Work]:
    """The counts of a pass over prompts (separate only if the rows `share` them) and over the rows."""
    prompts, completions = Work(), Work()
    share = share and any(len(counts) > 1 for _, counts in rows) and min(prompt for prompt, _ in rows) > 1
    for prompt, counts in rows:
        before = prompt - 1 if share else 0  # the last token of a prompt is read with each completion
        if share:
            prompts = prompts.plus(Work(before, before**2))
        for count in counts:
            read = count if share else prompt + count
            completions = completions.plus(Work(read, read * (before + read), count if headed else 0))
    return prompts, completions
