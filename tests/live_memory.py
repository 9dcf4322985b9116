"""Bytes of tensors that are alive, as CUDA's allocator would count them, on any device."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts each storage that an operation returns until nobody holds it: bytes `now`, and at the `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.sizes:
                storage = x.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return result

    def _free(self, key: int) -> None:
        self.now -= self.sizes.pop(key)
