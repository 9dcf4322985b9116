"""Gives this process its rank among the processes of a trial (one per device), and the messages between them.

A single process is rank 0 of 1, and every function here is then the identity. All ranks call them in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..settings.errors import SpecError

T = TypeVar("T")
R = TypeVar("R")
_note: Callable[[BaseException], bool] = lambda error: True  # noqa: E731


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def same(decide: Callable[[], T]) -> T:
    """The decision of rank 0, on every rank; only rank 0 computes it."""
    if world_size() == 1:
        return decide()
    told = [decide() if rank() == 0 else None]
    dist.broadcast_object_list(told, src=0)
    return told[0]  # pyright: ignore[reportReturnType]


def shared(items: Sequence[T], work: Callable[[Sequence[T]], Sequence[R]], together: int = 1) -> list[R]:
    """The results of all items in their order, on every rank; each works on a part of them, which may be empty.
    `together` ranks in a row get the same part, and the results of the first of them count."""
    parts = of_all(list(work(own_part(items, together))))
    return [result for part in parts[::together] for result in part]


def own_part(items: Sequence[T], together: int = 1) -> Sequence[T]:
    """The items on which this rank works in `shared`; exchanges nothing."""
    teams, team = max(world_size() // together, 1), rank() // together
    first, last = (len(items) * place // teams for place in (team, team + 1))
    return items[first:last]


def dealt(rows: Tensor) -> Tensor:
    """This rank's part of the rows, in their order; each has as many, for the last row may be there again."""
    if world_size() == 1:
        return rows
    each = -(-len(rows) // world_size())
    return rows[torch.arange(rank() * each, (rank() + 1) * each, device=rows.device).clamp(max=len(rows) - 1)]


def all_dealt(part: Tensor, count: int) -> Tensor:
    """All `count` rows, gathered from the `dealt` part of each rank."""
    if world_size() == 1:
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)[:count]


def own_sum(rows: Tensor) -> Tensor:
    """This rank's `dealt` part of the sum of all ranks' rows; 0 for a row that is there again."""
    if world_size() == 1:
        return rows
    return dealt(summed(torch.cat([rows, rows.new_zeros(-len(rows) % world_size(), *rows.shape[1:])])))


@contextmanager
def telling(note: Callable[[BaseException], bool]) -> Iterator[None]:
    """Inside, `tell` calls `note`."""
    global _note
    before, _note = _note, note
    try:
        yield
    finally:
        _note = before


def tell(error: BaseException) -> bool:
    """Tell the other ranks of an error, before anything waits for them. Whether this one may end what all share."""
    return _note(error)


def apart() -> Any:
    """A group of all ranks for messages from another thread (`gathered`); None for a single process."""
    return dist.new_group(backend="gloo") if world_size() > 1 else None


def of_all(value: T) -> list[T]:
    """The values of all ranks, in their order, on every rank."""
    return gathered(value, dist.group.WORLD)


def gathered(value: T, group: Any) -> list[T]:
    """The same, for a group that `apart` made."""
    if group is None:
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def joined_rows(rows: Tensor, shape: Sequence[int], owner: int, group: Any) -> Tensor | None:
    """The whole tensor, joined from the rows that `chunk` deals to each rank of the group; None but on its owner."""
    if rank() != owner:
        if len(rows):
            dist.send(rows, owner, group=group)
        return None
    whole = rows.new_empty(tuple(shape))
    for source, part in enumerate(whole.chunk(world_size())):
        if source == owner:
            part.copy_(rows)
        else:
            dist.recv(part, source, group=group)
    return whole


def from_first(work: Callable[[], T]) -> T:
    """The result of rank 0, a model or a tree of tensors, on every rank; only rank 0 works, however long it takes. On
    the others parameters, and tensors with axes, have no storage (`meta`): `sharding` fills them."""
    if world_size() == 1:
        return work()
    patient: Any = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    result: Any = work() if rank() == 0 else None
    told = [without_storage(result)]
    dist.broadcast_object_list(told, src=0, group=patient)
    return result if rank() == 0 else told[0]


def without_storage(value: Any) -> Any:
    """A copy of a model or a tree, with its parameters, or tensors with axes, on `meta`."""
    if isinstance(value, nn.Module):
        empty = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in value.parameters()}
    else:
        empty = {id(x): x.to("meta") for x in tree_leaves(value) if isinstance(x, Tensor) and x.dim()}
    return deepcopy(value, empty)


def check_alike(directory: Path, **seen: object) -> None:
    """SpecError if ranks do not see the same, because their hosts have different files."""
    for what, own in seen.items():
        alike = of_all(own == same(lambda own=own: own))
        if not all(alike):
            raise SpecError(
                f"all hosts of a trial must see the same {what}, process {alike.index(False)} sees others than process "
                f"0; give all the same files (the run is in '{directory}')"
            )


def summed(values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The sum over all ranks."""
    if world_size() > 1:
        values = values.clone()
        dist.all_reduce(values, operation)
    return values


def largest(values: Tensor) -> Tensor:
    """The largest over all ranks."""
    return summed(values, dist.ReduceOp.MAX)
