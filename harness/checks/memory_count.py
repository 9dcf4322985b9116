"""Counts the parameters of a run and the bytes that one pass keeps for its backward pass, on models without storage.

The pass runs on PyTorch's fake tensors, which have shape, type and device but no numbers; autograd's hooks see every
saved tensor. Distinct storages count, except parameters. The fake tensors are always on the CPU, because fake GPU
tensors would start a CUDA context in a process that only estimates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..devices.device import mixed_precision
from ..devices.sharding import layers, total_bytes
from ..policy.forward import Critic, PromptStates, backbone, can_share_prompts, prompt_cache, state_logprobs
from ..policy.fused_llama import recognised
from ..policy.library import given_cache, import_generation, lean_passes
from ..policy.lora import add_adapter, hold_frozen_products, hold_scorer
from ..policy.model import empty_model
from ..settings.run import LoRA, RunSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Shape:
    """Everything that decides the counts; a pass reads `rows` rows of full length."""

    config: str  # of the model, as JSON
    dtype: str
    autocast: bool
    lora: LoRA | None
    needs_critic: bool
    shares_trunk: bool
    entropy_gradient: bool
    is_lean: bool  # as passes of a CPU are that compute no activations again
    rows: int
    prompt_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, spec: RunSpec, config: PretrainedConfig, rows: int, prompt_tokens: int, device: str = "cpu") -> Shape:
        model = (json.dumps(config.to_dict(), default=str), spec.dtype, spec.autocast, spec.lora)
        needed = (spec.algorithm.needs_critic, spec.algorithm.shares_trunk, spec.algorithm.entropy_bonus > 0)
        is_lean = device == "cpu" and spec.gradient_checkpointing is not True
        return cls(*model, *needed, is_lean, rows, prompt_tokens, spec.max_tokens)


@dataclass
class Kept:
    """Bytes that a pass keeps: in all, in each layer that checkpointing computes again, and of that layer's inputs."""

    all: int = 0
    layers: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    cache: list[int] = field(default_factory=list)  # keys and values of each layer, which only a sampler keeps

    @property
    def largest(self) -> int:
        """Bytes that a layer adds to its input."""
        return max((kept - given for kept, given in zip(self.layers, self.inputs, strict=True)), default=0)

    def total(self, checkpointing: bool) -> int:
        return self.all - sum(self.layers) + sum(self.inputs) if checkpointing else self.all


@dataclass(frozen=True)
class Counts:
    """Bytes of parameters (a critic's without the parameters that it shares) and bytes that passes keep."""

    policy: int
    weights: int  # number of them without an adapter, as an engine or a saved model has them
    critic: int
    trainable: int
    head: int  # of the trainable ones
    head_is_tied: bool
    is_fused: bool  # the run makes rearranged copies of the weights
    cast: int  # of the trunk's weights: copies in bfloat16 that autocast holds
    vocabulary: int
    layer: int  # of the policy's largest layer
    root: int  # outside of layers: embeddings, norm and head
    trunk: Kept  # of the policy; a critic's own trunk is a copy of it and keeps the same
    shared: Kept | None  # of completions alone, after keys and values that rows of a prompt share; None: they cannot
    states: int  # of the completions, which the head reads
    logprobs: int  # kept after the trunk, the states and all logits among them
    values: int


@lru_cache(maxsize=64)  # arms of a study often share their shape
def count(shape: Shape) -> Counts:
    """The counts of a shape. Raises the model's own error if it cannot be built or run without numbers."""
    policy, critic, added = models(shape)
    head = policy.get_output_embeddings().weight
    linear = [m.weight for m in backbone(policy).modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
    trunk, shared, logprobs, values = _pass(shape, policy, critic)
    layer_bytes = [total_bytes(layer.parameters()) for layer in layers(policy)]
    return Counts(
        policy=total_bytes(policy.parameters()),
        weights=sum(p.numel() for name, p in policy.named_parameters() if ".lora_" not in name),
        critic=total_bytes(added),
        trainable=total_bytes(p for p in [*policy.parameters(), *added] if p.requires_grad),
        head=total_bytes([head] if head.requires_grad else []),
        head_is_tied=head is policy.get_input_embeddings().weight,
        is_fused=recognised(policy) and not shape.autocast,
        cast=total_bytes(linear) // 2 if shape.autocast else 0,
        vocabulary=len(head),
        layer=max(layer_bytes, default=0),
        root=total_bytes(policy.parameters()) - sum(layer_bytes),
        trunk=trunk,
        shared=shared,
        states=shape.rows * shape.max_tokens * policy.config.hidden_size * head.element_size(),
        logprobs=logprobs,
        values=values,
    )


def scorer_bytes(model: nn.Module, autocast: bool) -> int:
    """Bytes of a copy of a model without storage that only scores: a reference or a teacher."""
    return total_bytes(hold_scorer(deepcopy(model), autocast).parameters())


def models(shape: Shape) -> tuple[Any, Critic | None, list[nn.Parameter]]:
    """The run's policy and critic with shapes and no storage, which nobody may change, and what only the critic has."""
    return _built(replace(shape, entropy_gradient=False, is_lean=False, rows=0, prompt_tokens=0, max_tokens=0))


@lru_cache(maxsize=2)  # passes of several sizes, and checkpoints
def _built(shape: Shape) -> tuple[Any, Critic | None, list[nn.Parameter]]:
    import_generation()
    from transformers import AutoConfig

    with torch.random.fork_rng(devices=[]):  # heads and adapters draw initial weights
        policy = empty_model(AutoConfig.for_model(**json.loads(shape.config))).to(dtype=getattr(torch, shape.dtype))
        if shape.lora is not None:
            add_adapter(policy, shape.lora, seed=0)
            if shape.autocast:
                hold_frozen_products(policy, torch.bfloat16)
        critic = Critic(policy, shared=shape.shares_trunk) if shape.needs_critic else None
    own = {id(p) for p in policy.parameters()}
    return policy, critic, [p for p in critic.parameters() if id(p) not in own] if critic is not None else []


def _pass(shape: Shape, policy: nn.Module, critic: Critic | None) -> tuple[Kept, Kept | None, int, int]:
    """(bytes that the trunk keeps, the same for completions of shared prompts, bytes that log-probs of its states add,
    bytes that values add)."""
    from transformers.cache_utils import DynamicCache

    class PassingCache(DynamicCache):
        """Passes keys and values through. Without a cache the library reads the positions' values."""

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            kept.cache.append(total_bytes([key_states, value_states]))
            states.append((key_states.detach()[:, :, 1:], value_states.detach()[:, :, 1:]))
            return key_states, value_states

    states: list[tuple[Tensor, Tensor]] = []
    real = nn.ModuleList([policy, *([critic.head] if critic is not None else [])])
    with FakeTensorMode():
        tensors = (*real.parameters(), *real.buffers())
        fakes: dict[int, Any] = {id(x): torch.empty(x.shape, dtype=x.dtype) for x in tensors}
        fakes |= {id(p): nn.Parameter(fakes[id(p)], requires_grad=p.requires_grad) for p in real.parameters()}
        policy, *value_heads = copies = deepcopy(real, fakes)
        lean = lean_passes if shape.is_lean else nullcontext
        tokens_BT = torch.zeros(shape.rows, shape.prompt_tokens + shape.max_tokens, dtype=torch.int64)
        with _watched(copies) as kept, lean(policy), mixed_precision(tokens_BT.device, shape.autocast):
            cache = given_cache(policy, PassingCache(config=policy.config))  # pyright: ignore[reportArgumentType]
            states_BTH = backbone(policy)(input_ids=tokens_BT, use_cache=True, **cache).last_hidden_state
            trunk = replace(kept)
            hidden_NH = states_BTH[:, shape.prompt_tokens - 1 : -1].flatten(0, 1)
            targets_N = tokens_BT[:, shape.prompt_tokens :].flatten()
            found = state_logprobs(policy, hidden_NH, targets_N, 1.0, entropy_gradient=shape.entropy_gradient)
            with_logprobs = kept.all
            if not shape.shares_trunk:
                hidden_NH = hidden_NH.clone()
            found = [found, *(head(hidden_NH.to(head.weight.dtype)) for head in value_heads)]
        shared, before = None, shape.prompt_tokens - 1
        if can_share_prompts(policy) and before > 0:
            states = [(keys[:, :, :before], values[:, :, :before]) for keys, values in states]
            rows_B = torch.zeros(shape.rows, dtype=torch.int64)
            prompts, completions_BT = PromptStates(states, [], rows_B, rows_B), tokens_BT[:, shape.prompt_tokens :]
            with _watched(copies) as shared, lean(policy), mixed_precision(tokens_BT.device, shape.autocast):
                backbone(policy)(
                    input_ids=completions_BT, position_ids=before + torch.arange(shape.max_tokens)[None],
                    use_cache=True, **given_cache(policy, prompt_cache(policy, prompts)),
                )  # fmt: skip
    return trunk, shared, with_logprobs - trunk.all, kept.all - with_logprobs


@contextmanager
def _watched(models: nn.Module) -> Iterator[Kept]:
    """The bytes that autograd saves within the context."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    kept, before = Kept(), 0
    storages = {id(s): s for s in (p.untyped_storage() for p in models.parameters())}  # held, or ids are used again

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in storages:
            storages[id(storage)] = storage
            kept.all += storage.nbytes()
        return tensor

    def enter(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        nonlocal before
        before = kept.all
        kept.inputs.append(total_bytes(x for x in arguments if isinstance(x, Tensor)))

    hooks = []
    for layer in models.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            hooks.append(layer.register_forward_pre_hook(enter))
            hooks.append(layer.register_forward_hook(lambda *_: kept.layers.append(kept.all - before)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
    for hook in hooks:
        hook.remove()
