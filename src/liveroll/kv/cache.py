"""The caches that transformers' models are given in a forward of the engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from liveroll.kv.storage import PagedStorage


class PassingCache(Cache):  # type: ignore[misc]
    """A transformers `Cache` that keeps nothing: our attention puts the keys and values that it is given into pages.

    It tells the model that nothing was seen before: positions and masks come from outside, and a forward's own
    keys and values are handed back to its attention unchanged.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The `[B, kv_heads, T, dim]` keys and values of a layer, as given."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen before this forward, as far as the model is concerned: none."""
        return 0

    def get_mask_sizes(self, query: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """Keys of this forward and their offset; `query` is a length or, before 5.0, the positions."""
        return (query if isinstance(query, int) else query.shape[0]), 0


class PagedCache(PassingCache):
    """Puts keys and values into pages itself, for forwards with the model's own attention.

    Args:
        storage: where to write.
        index: `[B * T]` int64 storage rows of the forward's tokens, row-major.
    """

    def __init__(self, storage: PagedStorage, index: Tensor) -> None:
        super().__init__()
        self._storage = storage
        self._index = index

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of a layer, and hand them back."""
        self._storage.write(
            layer_idx,
            self._index,
            key_states.transpose(1, 2).flatten(0, 1),
            value_states.transpose(1, 2).flatten(0, 1),
        )
        return key_states, value_states
