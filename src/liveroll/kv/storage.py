"""Keys and values of all layers, in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from liveroll.model.geometry import LayerSpec


class PagedStorage:
    """One pair of tensors a layer: keys `[pages, page_size, kv_heads, key_dim]`, values with `value_dim`.

    Args:
        layers: what each layer stores.
        pages: pages, the scratch page included.
        page_size: tokens in a page.
        dtype: dtype of keys and values.
        device: where they live.
    """

    def __init__(
        self, layers: Sequence[LayerSpec], pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pages = pages
        self.page_size = page_size

        def allocate(heads: int, dim: int) -> Tensor:
            # Zeros, since attention multiplies masked values by zero and must not meet a NaN there.
            return torch.zeros(pages, page_size, heads, dim, dtype=dtype, device=device)

        # Tensors made in inference mode could not be written to by a later call outside of it.
        with torch.inference_mode(False):
            self.keys = [allocate(layer.kv_heads, layer.key_dim) for layer in layers]
            self.values = [allocate(layer.kv_heads, layer.value_dim) for layer in layers]

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def write(self, layer: int, index: Tensor, key: Tensor, value: Tensor) -> None:
        """Store tokens.

        Args:
            layer: index of the layer.
            index: `[T]` int64, page × page_size + offset of each token.
            key: `[T, kv_heads, key_dim]` of any dtype that the storage's holds without loss.
            value: `[T, kv_heads, value_dim]`, likewise.
        """
        for stored, given in ((self.keys[layer], key), (self.values[layer], value)):
            stored.flatten(0, 1).index_copy_(0, index, given.to(stored.dtype))


def bytes_per_token(layers: Sequence[LayerSpec], dtype: torch.dtype) -> int:
    """Bytes of KV storage that one token takes over all layers."""
    return sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers) * dtype.itemsize
