"""Tensors that live on the CPU and say that they are on `cuda`: mistakes of devices and waits for them, without a GPU.

Within `pretend_cuda` the device is a tag. An operation on tensors of both kinds raises as CUDA's would (0-dim CPU
tensors and CPU indices are allowed there too), and so does `.numpy()` of a tagged one. What waits for a GPU (`float`,
`.tolist()`, `.cpu()`, boolean masks, `nonzero`, `unique`) is counted by its place in the product. Not seen: kernels,
memory, and C++ that compares devices itself. Autocast is the CPU's, so that dtypes are real.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

TAG = "_pretend_cuda"
PRODUCT = ("/harness/", "/algorithms/")
WAITS = {
    Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.nonzero,
    torch.nonzero, Tensor.unique, torch.unique, Tensor.masked_select, torch.masked_select,
}  # fmt: skip
TAKES_BOTH: set[Any] = {
    Tensor.copy_, Tensor.type, torch.is_tensor, Tensor.__repr__, Tensor.set_, Tensor.data_ptr, Tensor.is_set_to,
    torch._has_compatible_shallow_copy_type,
}  # fmt: skip
ANSWERS = ("max_memory_allocated", "memory_allocated", "memory_reserved", "reset_peak_memory_stats", "empty_cache")


class DeviceMismatch(RuntimeError):
    """An operation that CUDA would refuse."""


@contextmanager
def pretend_cuda(gib: float = 80, free: float | None = None) -> Iterator["PretendCuda"]:
    """A context in which `device="cuda"` is a tag on CPU tensors; gives the mode, whose `waits` are counted.

    The GPU has `gib` of memory, and `free` of them are free, by default all.
    """
    memory = (int(2**30 * (gib if free is None else free)), int(2**30 * gib))
    old = {name: getattr(torch.cuda, name) for name in ("is_available", "mem_get_info", *ANSWERS)}
    autocast, is_autocast, new = torch.autocast, torch.is_autocast_enabled, torch.nn.Parameter.__new__
    noise = torch.Generator

    def parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        return _tag(new(cls, data, requires_grad)) if on_cuda(data) else new(cls, data, requires_grad)

    try:
        vars(torch.cuda).update({name: lambda *_: 0 for name in ANSWERS})
        vars(torch.cuda).update(is_available=lambda: True, mem_get_info=lambda *_: memory)
        torch.autocast = lambda kind, **settings: autocast("cpu", **settings)  # pyright: ignore
        torch.Generator = type("Generator", (noise,), {"__new__": lambda *_: noise("cpu")})  # pyright: ignore
        torch.is_autocast_enabled = lambda kind: is_autocast("cpu")  # pyright: ignore
        torch.nn.Parameter.__new__ = parameter  # pyright: ignore
        with PretendCuda() as mode:
            yield mode
    finally:
        vars(torch.cuda).update(old)
        torch.autocast, torch.is_autocast_enabled, torch.nn.Parameter.__new__ = autocast, is_autocast, new
        torch.Generator = noise


def on_cuda(x: Any) -> bool:
    return isinstance(x, Tensor) and TAG in x.__dict__


class PretendCuda(TorchFunctionMode):
    """Follows the tag through every operation and counts in `waits` those that wait for the device, by place."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "_parse_to":
            return func(*args, **kwargs)
        if func == Tensor.device.__get__:  # pyright: ignore
            return torch.device("cuda") if on_cuda(args[0]) else func(*args)
        if func in (Tensor.is_cuda.__get__, Tensor.is_cpu.__get__):  # pyright: ignore
            return on_cuda(args[0]) == (func == Tensor.is_cuda.__get__)  # pyright: ignore
        if func == Tensor.data.__set__:  # pyright: ignore
            func(*args)
            return _tag(args[0]) if on_cuda(args[1]) else args[0].__dict__.pop(TAG, None)
        tensors = _tensors((*args, *kwargs.values()))
        is_tagged = any(map(on_cuda, tensors))
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self._move(func, args, kwargs, is_tagged)
        if func in (Tensor.numpy, Tensor.__array__) and is_tagged:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func in WAITS and is_tagged:
            self._wait(name)
        result_is_tagged = is_tagged
        if kwargs.get("device") is not None:
            result_is_tagged = _is_cuda(kwargs["device"])
            kwargs["device"] = "cpu" if result_is_tagged else kwargs["device"]
        elif "like" in name or name.startswith("new_"):
            result_is_tagged = on_cuda(args[0])
        elif func in (Tensor.__getitem__, Tensor.__setitem__):
            self._check_indexing(*args)
        elif is_tagged and func not in TAKES_BOTH and name not in ("__get__", "__set__"):
            wrong = [x for x in tensors if not on_cuda(x) and x.dim()]
            if wrong:
                raise DeviceMismatch(f"{name}: cuda beside cpu {tuple(wrong[0].shape)}")
        result = func(*args, **kwargs)
        return tree_map(_tag, result) if result_is_tagged else result

    def _check_indexing(self, own: Tensor, index: Any, value: Any = None) -> None:
        indices = _tensors((index,))
        if any(x.dtype == torch.bool and on_cuda(x) for x in indices):
            self._wait("boolean mask")
        if not on_cuda(own) and any(map(on_cuda, indices)):
            raise DeviceMismatch("cuda indices on a CPU tensor")
        if isinstance(value, Tensor) and value.dim() and on_cuda(value) != on_cuda(own):
            raise DeviceMismatch("an assignment between two devices")

    def _move(self, func: Any, args: Any, kwargs: Any, was_cuda: bool) -> Tensor:
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        for x in args[1:]:
            if isinstance(x, Tensor):
                device, dtype = ("cuda" if on_cuda(x) else "cpu"), x.dtype
            elif isinstance(x, torch.device | str):
                device = x
            elif isinstance(x, torch.dtype):
                dtype = x
        device = {Tensor.cpu: "cpu", Tensor.cuda: "cuda"}.get(func, device)
        is_cuda = was_cuda if device is None else _is_cuda(device)
        if was_cuda and not is_cuda:
            self._wait("to cpu")
        result = args[0] if dtype is None else args[0].to(dtype)  # before it moves, as CUDA does
        result = result.clone() if is_cuda != was_cuda and result is args[0] else result  # a copy, as a move is
        return _tag(result) if is_cuda else result

    def _wait(self, kind: str) -> None:
        frame: Any = sys._getframe(2)
        while frame and not any(part in frame.f_code.co_filename for part in PRODUCT):
            frame = frame.f_back
        place = "library" if frame is None else f"{frame.f_code.co_filename.rsplit('/', 1)[1]}:{frame.f_lineno}"
        self.waits[f"{place} {kind}"] += 1


def _tag(x: Any) -> Any:
    if isinstance(x, Tensor):
        x.__dict__[TAG] = True
    return x


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    leaves = [x for v in values for x in (tree_leaves(v) if isinstance(v, tuple | list | dict) else (v,))]
    return [x for x in leaves if isinstance(x, Tensor)]


def _is_cuda(device: Any) -> bool:
    return torch.device(device).type == "cuda"
