"""PyTorch's variable-length flash kernel for packed prefill."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from liveroll.attention.layout import PackedLayout, PagedLayout
from liveroll.attention.reference import ReferenceAttention
from liveroll.model.geometry import AttentionTraits, LayerSpec


class VarlenAttention:
    """An `AttentionBackend` whose packed form is one kernel over all sequences."""

    def __init__(self) -> None:
        self._reference = ReferenceAttention()

    @staticmethod
    def serves(layer: LayerSpec, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the kernel does exactly what the layer asks for.

        Flash attention takes fp16 and bf16 with equal head dimensions up to 256 and has neither sinks nor, in
        PyTorch's binding, a soft-cap.
        """
        return (
            device.type == "cuda"
            and torch.cuda.get_device_capability(device) >= (8, 0)
            and dtype in (torch.float16, torch.bfloat16)
            and layer.key_dim == layer.value_dim <= 256
            and layer.key_dim % 8 == 0
            and layer.traits.softcap is None
            and not layer.sinks
        )

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
        longest = layout.longest
        output = varlen_attn(
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
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(output, Tensor)
        return output

    def paged(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        layout: PagedLayout,
        traits: AttentionTraits,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `AttentionBackend.paged`."""
        return self._reference.paged(query, keys, values, layout, traits, sinks)
