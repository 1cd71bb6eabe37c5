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
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        # Pages are copied as the largest integers that all of them consist of.
        page_sizes = [math.prod(shape[1:]) * dtype.itemsize for shape in shapes]
        word = math.gcd(8, *page_sizes)
        self._words = self.arena.memory.view(_WORDS[word])
        self._largest_page = max(page_sizes) // word
        self._starts, self._page_sizes = torch.tensor([starts[:-1], page_sizes], device=device) // word

    @property
    def bytes(self) -> int:
        """Bytes of device memory held now."""
        return self.arena.bytes

    def write(self, layer: int, index: Tensor, key: Tensor, value: Tensor) -> None:
        """Store tokens.

        Args:
            layer: index of the layer.
            index: `[T]` int64, page × page_size + offset of each token.
            key: `[T, kv_heads, key_dim]` of any dtype that the storage's holds without loss.
            value: `[T, kv_heads, value_dim]`, likewise.
        """
        if key.is_cuda:
            from liveroll.kernels.kv_write import write_kv

            write_kv(key, value, self.keys[layer], self.values[layer], index)
            return
        for stored, given in ((self.keys[layer], key), (self.values[layer], value)):
            stored.flatten(0, 1).index_copy_(0, index, given.to(stored.dtype))

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages of all layers.

        Args:
            sources: `[C]` int64 pages.
            targets: `[C]` int64 pages, all different and none of them a source.
        """
        if self.arena.memory.is_cuda:
            from liveroll.kernels.page_copy import copy_pages

            copy_pages(self._words, self._starts, self._page_sizes, self._largest_page, sources, targets)
            return
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))


def bytes_per_token(layers: Sequence[LayerSpec], dtype: torch.dtype) -> int:
    """Bytes of KV storage that one token takes over all layers."""
    return sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers) * dtype.itemsize
