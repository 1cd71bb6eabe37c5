"""The two things attention can mean during a forward of the engine."""

from __future__ import annotations

from torch import Tensor

from liveroll.attention.backend import AttentionBackend
from liveroll.attention.layout import PackedLayout, PagedLayout
from liveroll.kv.storage import PagedStorage
from liveroll.model.geometry import AttentionTraits


class PackedCall:
    """Prefill: each token attends to its own sequence within the forward."""

    def __init__(self, backend: AttentionBackend, layout: PackedLayout) -> None:
        self._backend = backend
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
        """Attention over `[1, T, heads, dim]`."""
        return self._backend.packed(query[0], key[0], value[0], self._layout, traits, sinks)[None]


class PagedCall:
    """Decode: each row's new token attends to the row's pages."""

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
        return self._backend.paged(query[:, 0], keys, values, self._layout, traits, sinks)[:, None]
