"""A key-value cache that writes in place; a separate file, because the engine's settings are read without
transformers."""

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer


def preallocated_cache(model: nn.Module, capacity: int) -> DynamicCache:
    """The model's own cache, in which layers of fixed capacity replace those that would concatenate every token."""
    cache = DynamicCache(config=model.config)  # pyright: ignore
    cache.layers = [_PreallocatedLayer(capacity) if type(x) is DynamicLayer else x for x in cache.layers]
    return cache


class _PreallocatedLayer(DynamicLayer):
    """A cache layer of fixed capacity; `keys` and `values` are views of its filled part."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        start = 0 if not self.is_initialized else self.keys.shape[-2]  # pyright: ignore
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._allocate(key_states, value_states)
        end = start + key_states.shape[-2]
        self._keys[:, :, start:end] = key_states
        self._values[:, :, start:end] = value_states
        return self._view(end)

    def batch_repeat_interleave(self, repeats: int | Tensor) -> None:
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        self._allocate(keys, values, len(keys) * repeats if isinstance(repeats, int) else int(repeats.sum()))
        length = keys.shape[-2]
        for own, given in ((self._keys, keys), (self._values, values)):
            if isinstance(repeats, int):
                own.view(len(keys), repeats, *own.shape[1:])[:, :, :, :length] = given[:, None]
            else:
                own[:, :, :length] = given.repeat_interleave(repeats, dim=0)
        self._view(length)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these lines. Lines that stay in their place are not touched; others must come from beyond the end."""
        length, count = self.keys.shape[-2], len(indices)  # pyright: ignore
        places = (indices != torch.arange(count, device=indices.device)).nonzero()[:, 0]
        for states in (self._keys, self._values):
            states[places, :, :length] = states[indices[places], :, :length]
        self._keys, self._values = self._keys[:count], self._values[:count]
        self._view(length)

    def _allocate(self, keys: Tensor, values: Tensor, rows: int | None = None) -> None:
        def empty(like: Tensor) -> Tensor:
            batch, heads, _, width = like.shape
            return like.new_empty(rows or batch, heads, self.capacity, width)

        self._keys, self._values = empty(keys), empty(values)

    def _view(self, length: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self._keys[:, :, :length], self._values[:, :, :length]
        return self.keys, self.values
