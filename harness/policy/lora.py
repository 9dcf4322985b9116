"""Low-rank adapters on a policy's linear layers, which alone are trained (LoRA, Hu et al. 2021, arXiv:2106.09685).

The adapter starts as the identity and lives inside the model, whose class and methods stay as they are (peft). With it
off the model is the reference; with it merged the weights have the model's own names, as an engine or a saved model
wants them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from harness.spec.run import LoRA


ADAPTER = "default"


def add_adapter(policy: nn.Module, settings: LoRA, seed: int) -> None:
    """Freeze the policy and put a trainable float32 adapter on its linear layers, in place; `seed` draws its weights.

    ValueError if no layer has one of the names asked for.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = list(settings.targets) or _linear_layers(policy)
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets, lora_dropout=0.0)  # pyright: ignore
    policy.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, policy, adapter_name=ADAPTER)
        except ValueError as error:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in _linear_layers(policy)}))
            raise ValueError(f"lora.targets must name linear layers of the model ({known}), got {targets}") from error
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            assert "lora_" in name
            parameter.data = parameter.data.float()
    policy.eval()


def has_adapter(model: nn.Module) -> bool:
    return any(True for _ in _adapted(model))


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before it got an adapter."""
    layers = [layer for _, layer in _adapted(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's state with every adapter added to its layer, under the names that the model has without."""
    layers = dict(_adapted(model))
    merged: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        owner, _, kind = name.partition(".base_layer.")
        if owner not in layers:
            if ".lora_" not in name:
                merged[name] = value
            continue
        if kind == "weight":
            with torch.no_grad():
                value = (value.float() + layers[owner].get_delta_weight(ADAPTER).float()).to(value.dtype)
        merged[f"{owner}.{kind}"] = value
    return merged


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """The adapter alone, as `load_adapter` takes it."""
    return {name: value for name, value in model.state_dict().items() if ".lora_" in name}


def load_adapter(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Set the adapter's weights; RuntimeError if they are those of another one."""
    missing = adapter_weights(model).keys() ^ weights.keys()
    if missing:
        raise RuntimeError(f"the adapter has other layers: {sorted(missing)[0]}")
    model.load_state_dict(weights, strict=False)


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of every layer with an adapter."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


def _linear_layers(policy: nn.Module) -> list[str]:
    """The full names of all linear layers but the language-model head."""
    head = policy.get_output_embeddings()  # pyright: ignore
    return [name for name, module in policy.named_modules() if isinstance(module, nn.Linear) and module is not head]
