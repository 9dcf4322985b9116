"""Adds low-rank adapters to a policy's linear layers and trains only them (LoRA, Hu et al. 2021, arXiv:2106.09685).

The adapter starts as the identity and lives inside the model, whose class and methods stay (peft). With the adapter
off, the model is the reference. It is saved in peft's format, without the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..devices.ranks import world_size
from ..devices.sharding import is_plain, layers
from ..settings.run import LoRA
from .sources import ADAPTER_CONFIG

M = TypeVar("M", bound=nn.Module)
ADAPTER = "default"
WEIGHTS, PREFIX = "adapter_model.safetensors", "base_model.model."  # peft's file, and the prefix of its names


def add_adapter(policy: M, settings: LoRA, seed: int) -> M:
    """The policy itself, frozen but for a trainable float32 adapter on its linear layers; `seed` draws its weights.
    ValueError if no layer has one of the names asked for."""
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
    check_layers(policy, "lora.targets")
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            assert "lora_" in name
            parameter.data = parameter.data.float()
    return policy.eval()


def check_layers(model: nn.Module, what: str) -> None:
    """ValueError if an adapter changes an embedding or a head that is tied to it: merged, it would change both."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, layer in adapted_layers(model):
        if id(layer.base_layer.weight) in embeddings:
            raise ValueError(f"{what} must be linear layers without an embedding's weight, got {name}; leave it out")


def hold_frozen_products(policy: nn.Module, dtype: torch.dtype) -> None:
    """Keep the frozen weights of matrix products in the precision in which autocast computes them, in place: the same
    products without a cast in every pass. Other weights stay: norms, embeddings, and a head tied to them."""
    read = {id(m.weight) for m in policy.modules() if isinstance(m, nn.Embedding)}
    for module in policy.modules():
        if type(module) is nn.Linear:
            for parameter in module.parameters(recurse=False):
                if not parameter.requires_grad and id(parameter) not in read:
                    parameter.data = parameter.data.to(dtype)


def hold_scorer(model: M, autocast: bool) -> M:
    """The model itself, frozen, for passes without gradient; under `autocast` it holds its products as they compute,
    unless a layer has other weights too, which might read one of them in float32."""
    model.requires_grad_(False)
    if autocast and all(map(is_plain, layers(model))):
        hold_frozen_products(model, torch.bfloat16)
    return model


def has_adapter(model: nn.Module) -> bool:
    return any(True for _ in adapted_layers(model))


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Inside the context the model computes as without its adapter."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's state without its adapter, under the names that the model has without."""
    state = {name: value for name, value in model.state_dict().items() if ".lora_" not in name}
    return {name.replace(".base_layer.", "."): value for name, value in state.items()}


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """The adapter alone, as `load_adapter` takes it."""
    return {name: value for name, value in model.state_dict().items() if ".lora_" in name}


def load_adapter(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Set the adapter's weights; RuntimeError if they are another adapter's."""
    missing = adapter_weights(model).keys() ^ weights.keys()
    if missing:
        raise RuntimeError(f"the adapter has other layers: {sorted(missing)[0]}")
    model.load_state_dict(weights, strict=False)


def save_adapter(folder: Path, model: nn.Module, weights: Mapping[str, Tensor], base: str) -> None:
    """Write the model's adapter, whose `adapter_weights` are given, as a folder that peft loads onto `base`."""
    config: Any = model.peft_config[ADAPTER]  # pyright: ignore
    config.base_model_name_or_path, config.task_type = base, "CAUSAL_LM"
    config.save_pretrained(folder)
    saved = {PREFIX + name.replace(f".{ADAPTER}.", "."): x.cpu() for name, x in weights.items()}
    save_file(saved, folder / WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def merge_saved(model: nn.Module, folder: Path) -> None:
    """Add an adapter that `save_adapter` wrote to the weights of its base model, in place."""
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    saved = {name.removeprefix(PREFIX): value for name, value in load_file(folder / WEIGHTS).items()}
    for name in [name.removesuffix(".lora_A.weight") for name in saved if name.endswith(".lora_A.weight")]:
        weight: Any = model.get_submodule(name).weight
        change = saved[f"{name}.lora_B.weight"] @ saved[f"{name}.lora_A.weight"]
        weight += change * (config["lora_alpha"] / config["r"])


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of every layer with an adapter."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


def _linear_layers(policy: nn.Module) -> list[str]:
    """The full names of all linear layers but the language-model head."""
    head = policy.get_output_embeddings()  # pyright: ignore
    return [name for name, module in policy.named_modules() if isinstance(module, nn.Linear) and module is not head]


def around_frozen(model: M) -> M:
    """A copy of the model that shares its frozen weights and its buffers; of several processes, which shard it next,
    the weights are others on the same storage."""
    shared = {id(x): x for x in [*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]}
    if world_size() > 1:
        shared |= {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    return deepcopy(model, shared)
