"""Keys and values of all layers, in pages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from liveroll.kv.arena import make_arena
from liveroll.model.geometry import LayerSpec

# Wide loads of a kernel want every tensor to begin on such a boundary.
_ALIGNMENT = 256


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
        shapes = [(pages, page_size, layer.kv_heads, layer.key_dim) for layer in layers]
        shapes += [(pages, page_size, layer.kv_heads, layer.value_dim) for layer in layers]
        sizes = [-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape in shapes]
        # Arenas hold zeros, since attention multiplies masked values by zero and must not meet a NaN there.
        self.arena = make_arena(sum(sizes), device)
        starts = [0, *itertools.accumulate(sizes)]
        tensors = [
            self.arena.memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for shape, start in zip(shapes, starts, strict=False)
        ]
        self.keys, self.values = tensors[: len(layers)], tensors[len(layers) :]

    @property
    def bytes(self) -> int:
        """Bytes of device memory held now."""
        return self.arena.bytes

    def write(self, layer: int, index: Tensor, key: Tensor, value: Tensor) -> None:
        """Store tokens.

        Args:
            layer: index of the layer.
            index: `[T]` int64, page × page_size + offset of each token.
            key: `[T, kv_heads, key_dim]`.
            value: `[T, kv_heads, value_dim]`.
        """
        if key.is_cuda:
            from liveroll.kernels.kv_write import write_kv

            write_kv(key, value, self.keys[layer], self.values[layer], index)
            return
        # Under autocast, rotated keys are of another dtype than the values beside them.
        self.keys[layer].flatten(0, 1).index_copy_(0, index, key.to(self.keys[layer].dtype))
        self.values[layer].flatten(0, 1).index_copy_(0, index, value.to(self.values[layer].dtype))


def bytes_per_token(layers: Sequence[LayerSpec], dtype: torch.dtype) -> int:
    """Bytes of KV storage that one token takes over all layers."""
    return sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers) * dtype.itemsize
