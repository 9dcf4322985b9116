"""Shards a model's parameters over the processes of a trial (FSDP2, `torch.distributed.fsdp.fully_shard`).

Each layer is a group, gathered for its pass and freed afterwards. Embeddings, norm and head form the root's group. Head
and backbone are called separately here, so both run inside a method of the root (`under_hooks`) that gathers its group.
A sharded tensor is a DTensor; every function leaves an unsharded model as it is.
"""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from . import ranks

F = TypeVar("F", bound=Callable[..., Any])


def shard(module: nn.Module, device: torch.device, *, autocast: bool = False) -> None:
    """Shard a module's parameters over the devices of all processes, in place. The first process has the values and
    alone needs a storage; one tensor moves at a time.

    Gradients are summed: the loss of a row has its weight in the whole minibatch. With `autocast`, under which all
    passes then run, layers of products and norms are gathered in bfloat16, norms' weights too, but not the root's
    group.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    first = dict(module.named_parameters())
    metas = {p: nn.Parameter(p.to("meta"), p.requires_grad) for p in first.values()}
    for part in module.modules():
        part._parameters.update({name: metas[p] for name, p in part._parameters.items() if p is not None})
    del metas
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for part in layers(module):
        fully_shard(part, mesh=mesh, mp_policy=half if autocast and is_plain(part) else MixedPrecisionPolicy())
    fully_shard(module, mesh=mesh)
    names = {p: name for name, p in module.named_parameters()}
    own = {p: nn.Parameter(spread_like(p, first.pop(name), device), p.requires_grad) for p, name in names.items()}
    tied = {name: own[p] for name, p in module.named_parameters(remove_duplicate=False)}
    module.load_state_dict(tied, strict=False, assign=True)
    for part in _groups(module):
        part.set_force_sum_reduction_for_comms(True)  # gloo does not support scaled sums
        part.set_gradient_divide_factor(1.0)
    vars(module)["needs_autocast"] = autocast
    run: Any = types.MethodType(lambda self, function: function(), module)
    module.run = run
    register_fsdp_forward_method(module, "run")


def is_plain(layer: nn.Module) -> bool:
    """Whether only products and norms have parameters; a recurrent layer's would not bear rounding."""
    owners = [part for part in layer.modules() if any(True for _ in part.parameters(recurse=False))]
    return all(type(part) is nn.Linear or "norm" in type(part).__name__.lower() for part in owners)


def layers(module: nn.Module) -> Iterable[nn.Module]:
    """The layers of a decoder, which are its largest list of modules."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=lambda modules: total_bytes(modules.parameters())) if lists else ()


def total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def is_sharded(module: nn.Module) -> bool:
    return "run" in vars(module)


def under_hooks(function: F) -> F:
    """The function, run inside the forward hooks of the model that is its first argument, if it is sharded. The root's
    group stays gathered for a backward pass; without one it is freed here."""

    @wraps(function)
    def inside(model: Any, *args: Any, **named: Any) -> Any:
        if not is_sharded(model):
            return function(model, *args, **named)
        # Not as arguments, whose tensors FSDP would join to the model's own backward pass.
        result = model.run(partial(function, model, *args, **named))
        if not torch.is_grad_enabled():
            model.reshard()
        return result

    return inside  # pyright: ignore[reportReturnType]


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Inside the context every process has all parameters, so passes need no other process and may differ in number."""
    groups = _groups(module) if is_sharded(module) else []
    for group in groups:
        group.set_reshard_after_forward(False, recurse=False)
        group.unshard()
    try:
        yield
    finally:
        for group in groups:
            group.reshard()
            group.set_reshard_after_forward(group is not module, recurse=False)


def full(value: Tensor, own: Tensor | None = None) -> Tensor:
    """The whole of a tensor, on every process; with `own` of a tensor that is spread alike and has this part here."""
    if is_spread(value) and own is not None:
        from torch.distributed.tensor import DTensor

        mesh, placements = value.device_mesh, value.placements  # pyright: ignore
        value = DTensor.from_local(own, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())
    elif own is not None:
        return own
    return value.full_tensor() if is_spread(value) else value  # pyright: ignore


def local(value: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return value.to_local() if is_spread(value) else value  # pyright: ignore


def spread_like(own: Tensor, value: Tensor, device: torch.device | None = None) -> Tensor:
    """A copy of the whole tensor that the first process has, sharded like `own`, on `device` (by default its)."""
    device = own.device if device is None else device
    if ranks.world_size() == 1:
        return value.to(device, copy=True)
    whole = torch.empty_like(value, device=device) if value.is_meta else value.detach().to(device)
    if not is_spread(own):
        dist.broadcast(whole, src=0)
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, own.device_mesh, own.placements)  # pyright: ignore


def is_spread(value: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def spread(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The first process's whole weights placed like the module's own state."""
    if ranks.world_size() == 1:
        return dict(weights)
    own = module.state_dict()
    return {name: spread_like(own[name], value) if name in own else value for name, value in weights.items()}


@dataclass
class Part:
    """This process's copy of its rows of a tensor of this shape, for the rank that gets all of them."""

    rows: Tensor | None
    shape: torch.Size
    owner: int


def copied(tree: Any, *, on_first: bool = False, anew: bool = True) -> Any:
    """Copies on the CPU of this process's parts of all tensors in a tree (without `anew`, not of tensors that are
    there); no process waits for another. Each tensor gets as its owner the rank that owns the fewest bytes so far, or
    always the first (`on_first`); one that is not spread is None on other ranks. A GPU's come by its current stream
    into pinned memory, which torch keeps for the next copies."""
    taken, own = [0] * (1 if on_first else ranks.world_size()), ranks.rank()

    def copy(item: Tensor) -> Any:
        owner = taken.index(min(taken))
        taken[owner] += total_bytes([item])
        if not is_spread(item):
            return to_host(item) if owner == own else None
        return Part(to_host(local(item)), item.shape, owner)

    def to_host(value: Tensor) -> Tensor:
        return value.detach().to("cpu", copy=anew, non_blocking=value.is_cuda)

    found = tree_map_only(Tensor, copy, tree)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return found


def assembled(tree: Any, group: Any) -> Any:
    """A `copied` tree with whole tensors, each on its rank of the group and None on others; frees the parts."""

    def whole(part: Part) -> Tensor | None:
        rows, part.rows = part.rows, None
        assert rows is not None
        return ranks.joined_rows(rows, part.shape, part.owner, group)

    return tree_map_only(Part, whole, tree)


def joined(parts: Sequence[Any]) -> Any:
    """The whole tree, from the part that each rank has `assembled`."""
    return tree_map(lambda *items: next((item for item in items if item is not None), None), *parts)


def _groups(module: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]
