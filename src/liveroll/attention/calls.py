"""The two things attention can mean during a forward of the engine."""

from __future__ import annotations

from torch import Tensor

from liveroll.attention.backend import AttentionBackend
from liveroll.attention.layout import PackedLayout, PagedLayout
from liveroll.kv.storage import PagedStorage
from liveroll.model.geometry import AttentionTraits


class PackedCall:
    """Prefill: each token attends to its own sequence within the forward.

    Args:
        backend: does it.
        storage: keeps the keys and values.
        layout: where the sequences lie.
        index: `[T]` int64 storage rows of the tokens.
    """

    def __init__(self, backend: AttentionBackend, storage: PagedStorage, layout: PackedLayout, index: Tensor) -> None:
        self._backend = backend
        self._storage = storage
        self._layout = layout
        self._index = index

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: AttentionTraits,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention over `[1, T, heads, dim]`."""
        self._storage.write(layer, self._index, key[0], value[0])
        return self._backend.packed(query[0], key[0], value[0], self._layout, traits, sinks)[None]


class PagedCall:
    """Decode: each row's new token attends to the row's pages, in which it is put first.

    Args:
        backend: does it.
        storage: the pages.
        layout: pages and lengths of the rows.
    """

    def __init__(self, backend: AttentionBackend, storage: PagedStorage, layout: PagedLayout) -> None:
        self._backend = backend
        self._storage = storage
        self._layout = layout

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: AttentionTraits,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention over `[B, 1, heads, dim]`."""
        keys, values = self._storage.keys[layer], self._storage.values[layer]
        rows = self._backend.paged(query[:, 0], key[:, 0], value[:, 0], keys, values, self._layout, traits, sinks)
        return rows[:, None]
