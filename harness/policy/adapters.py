"""Puts several adapters on one frozen model: policies that share its weights, and a model in which each row uses one
adapter.

A policy is a copy of the model's modules around the same weights, so that training one adapter does not involve the
others. Sampling uses a separate copy, in which every line of a batch gets the low-rank term of its policy, and the
product with the frozen weights is computed once for all lines (Punica, arXiv:2310.18547, without its kernels).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from .lora import ADAPTER, adapted_layers, add_adapter

if TYPE_CHECKING:
    from ..spec.run import LoRA

M = TypeVar("M", bound=nn.Module)


def around_frozen(model: M) -> M:
    """A copy of the model that shares its frozen weights and its buffers."""
    shared = [*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]
    return deepcopy(model, {id(tensor): tensor for tensor in shared})


def policies_on(base: nn.Module, adapters: Sequence[tuple[LoRA, int]]) -> list[nn.Module]:
    """A policy for each (settings, seed) of an adapter, all on the weights of `base`, which it freezes."""
    base.requires_grad_(False)
    policies = []
    for settings, seed in adapters:
        policies.append(around_frozen(base))
        add_adapter(policies[-1], settings, seed)
    return policies


class AdapterRows:
    """`model` computes every line of a batch with the adapter of its own policy, as the policies are at that moment.

    The policies have adapters on the same layers of `base`. It is for sampling: no gradient reaches the adapters.
    """

    def __init__(self, base: nn.Module, policies: Sequence[nn.Module]):
        self.model = around_frozen(base)
        self._lines: list[tuple[int, Tensor | None]] = []  # (policy, its lines; None: all)
        found = [dict(adapted_layers(policy)) for policy in policies]
        assert all(layers.keys() == found[0].keys() for layers in found), "adapters of one shape"
        for name in found[0]:
            parent, _, child = name.rpartition(".")
            layer = _AdaptedRows(self.model.get_submodule(name), [layers[name] for layers in found], self._lines)
            setattr(self.model.get_submodule(parent), child, layer)

    def use(self, policy_of_line: Tensor) -> None:
        """Set the policy, by its number, of every line of the next passes."""
        numbers = policy_of_line.unique().tolist()
        self._lines.clear()
        self._lines += [(n, (policy_of_line == n).nonzero()[:, 0] if len(numbers) > 1 else None) for n in numbers]


class _AdaptedRows(nn.Module):
    """A frozen linear layer that adds to each line the low-rank term of its adapter."""

    def __init__(self, base_layer: nn.Module, layers: Sequence[Any], lines: list[tuple[int, Tensor | None]]):
        super().__init__()
        self.base_layer = base_layer
        self._layers = [(x.lora_A[ADAPTER], x.lora_B[ADAPTER], x.scaling[ADAPTER]) for x in layers]  # not its own
        self._lines = lines

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        for number, lines in self._lines:
            down, up, scaling = self._layers[number]
            part = x if lines is None else x[lines]
            term = (up(down(part.to(down.weight.dtype))) * scaling).to(result.dtype)
            result = result + term if lines is None else result.index_add_(0, lines, term)
        return result


class AdapterDecoder:
    """A decoder of the transformers engine over an `AdapterRows.model`, which it tells the adapter of each line."""

    def __init__(self, decoder: Any, rows: AdapterRows, policy_of_prompt: Tensor):
        self._decoder, self._rows, self._policies = decoder, rows, policy_of_prompt
        self.step = decoder.step

    def prefill(self, tokens: Tensor, mask: Tensor) -> Tensor:
        self._rows.use(self._policies)
        return self._decoder.prefill(tokens, mask)

    def expand(self, repeats: int | Tensor) -> None:
        self._decoder.expand(repeats)
        self._now(self._policies.repeat_interleave(torch.as_tensor(repeats, device=self._policies.device)))

    def select(self, lines: Tensor) -> None:
        self._decoder.select(lines)
        self._now(self._policies[lines])

    def _now(self, policies: Tensor) -> None:
        self._policies = policies
        self._rows.use(policies)
