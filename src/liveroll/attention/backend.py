"""What an attention backend does, and which one serves a model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from liveroll.attention.layout import PackedLayout, PagedLayout
from liveroll.attention.reference import ReferenceAttention
from liveroll.model.geometry import AttentionTraits


class AttentionBackend(Protocol):
    """Causal attention in the two forms a rollout needs; both return `[T, query_heads, value_dim]`."""

    def packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: PackedLayout,
        traits: AttentionTraits,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention within each of several packed sequences.

        Args:
            query: `[T, query_heads, key_dim]`.
            key: `[T, kv_heads, key_dim]`.
            value: `[T, kv_heads, value_dim]`.
            layout: where the sequences lie.
            traits: scale, window, soft-cap.
            sinks: `[query_heads]` sink logits or None.
        """
        ...

    def paged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        layout: PagedLayout,
        traits: AttentionTraits,
        sinks: Tensor | None,
    ) -> Tensor:
        """Put one new token a row into the row's pages, and attend from it to all of them.

        Args:
            query: `[B, query_heads, key_dim]`.
            key: `[B, kv_heads, key_dim]` of the new tokens.
            value: `[B, kv_heads, value_dim]`.
            keys: `[pages, page_size, kv_heads, key_dim]`.
            values: the same with `value_dim`.
            layout: pages and lengths of the rows.
            traits: scale, window, soft-cap.
            sinks: `[query_heads]` sink logits or None.
        """
        ...

    def rows_together(self, group: int, dtype: torch.dtype) -> int:
        """Rows for which `paged` reads keys once that they share, or 1 where it reads them for each.

        Args:
            group: query heads of a KV head.
            dtype: of queries and keys.
        """
        ...


def name_backend(device: torch.device) -> str:
    """What `choose_backend` gives a device, by a name that results can be labelled with."""
    return "GpuAttention" if device.type == "cuda" else "ReferenceAttention"


def choose_backend(device: torch.device, heads: int) -> AttentionBackend:
    """The fastest backend of a device, for decode steps of up to so many pairs of a row and a KV head."""
    if device.type == "cuda":
        # Triton is not there on every platform that runs the reference.
        from liveroll.attention.fast import GpuAttention

        return GpuAttention(device, heads)
    return ReferenceAttention()
