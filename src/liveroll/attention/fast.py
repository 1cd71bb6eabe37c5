"""Attention on a GPU: PyTorch's variable-length flash kernel or our own over packed prompts, our own over pages."""

from __future__ import annotations

import torch
from torch import Tensor

from liveroll.attention.layout import PackedLayout, PagedLayout
from liveroll.attention.reference import ReferenceAttention
from liveroll.kernels.packed_attention import packed_attention
from liveroll.kernels.paged_attention import paged_attention
from liveroll.kernels.prefix_attention import attend_prefixes, rows_together
from liveroll.model.geometry import AttentionTraits
from liveroll.model.versions import varlen_attention

# Up to here our own kernel is the faster one on an H200: 78 us against 104 for 2,000 tokens of 16 heads of 128, and 4
# against 14 for 32 times 16 tokens, a layer.
_SHORT = 2048
_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class GpuAttention:
    """An `AttentionBackend` of kernels; for a dtype that they do not take, attention is the reference's.

    Args:
        device: the GPU.
        heads: most pairs of a row and a KV head in one decode step.
    """

    def __init__(self, device: torch.device, heads: int) -> None:
        self._reference = ReferenceAttention()
        self._arrived = torch.zeros(heads, dtype=torch.int32, device=device)

    def packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: PackedLayout,
        traits: AttentionTraits,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `AttentionBackend.packed`."""
        if query.dtype not in _KERNEL_DTYPES:
            return self._reference.packed(query, key, value, layout, traits, sinks)
        served = serves_packed(query.dtype, query.shape[-1], value.shape[-1], traits, sinks is not None)
        # PyTorch's kernel must be told the longest sequence, which a captured forward does not know.
        if layout.lengths is None or layout.longest <= _SHORT or not served:
            return packed_attention(
                query,
                key,
                value,
                layout.column,
                scale=traits.scale,
                window=traits.window,
                softcap=traits.softcap,
                sinks=sinks,
            )
        longest = layout.longest
        varlen = varlen_attention(grouped=query.shape[1] != key.shape[1])
        output: Tensor = varlen(
            query,
            key,
            value,
            layout.starts,
            layout.starts,
            longest,
            longest,
            scale=traits.scale,
            # The kernel counts the keys to the left of a token, the model the token too.
            window_size=(-1 if traits.window is None else traits.window - 1, 0),
        )
        return output

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
        """See `AttentionBackend.paged`."""
        if query.dtype not in _KERNEL_DTYPES:
            return self._reference.paged(query, key, value, keys, values, layout, traits, sinks)
        prefix = None
        # Of keys that rows share, a window shows each of them others.
        if layout.prefixes is not None and traits.window is None:
            prefix = attend_prefixes(
                query,
                keys,
                values,
                layout.block_table,
                layout.prefixes,
                longest=layout.longest,
                scale=traits.scale,
                softcap=traits.softcap,
            )
        return paged_attention(
            query,
            key,
            value,
            keys,
            values,
            layout.block_table,
            layout.lengths,
            layout.index,
            self._arrived,
            longest=layout.longest,
            scale=traits.scale,
            window=traits.window,
            softcap=traits.softcap,
            sinks=sinks,
            prefix=prefix,
        )

    def rows_together(self, group: int, dtype: torch.dtype) -> int:
        """See `AttentionBackend.rows_together`."""
        return rows_together(group, dtype) if dtype in _KERNEL_DTYPES else 1


def serves_packed(dtype: torch.dtype, key_dim: int, value_dim: int, traits: AttentionTraits, sinks: bool) -> bool:
    """Whether PyTorch's kernel does exactly what a layer asks for.

    Flash attention takes fp16 and bf16 with equal head dimensions up to 256, and PyTorch's binding of it has neither
    sinks nor a soft-cap.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    return half and key_dim == value_dim <= 256 and key_dim % 8 == 0 and traits.softcap is None and not sinks
