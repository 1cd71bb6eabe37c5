"""Pages are copied in every layer, and nothing else is written."""

from __future__ import annotations

import pytest
import torch

from liveroll.kernels.page_copy import copy_pages
from liveroll.kv.storage import PagedStorage
from liveroll.model.geometry import AttentionTraits, LayerSpec

TRAITS = AttentionTraits(scale=1.0, window=None, softcap=None)
PAGES = 7


def storage_of(device, dtype, page_size, shapes):
    """Pages of random numbers, for layers of these numbers of heads, key and value dimensions."""
    layers = [LayerSpec(heads, heads, key, value, TRAITS, False) for heads, key, value in shapes]
    storage = PagedStorage(layers, PAGES, page_size, dtype, device)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*storage.keys, *storage.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return storage


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("page_size", "shapes"),
    [
        (4, [(2, 8, 8), (2, 8, 8)]),
        (16, [(2, 80, 64), (1, 24, 128)]),  # pages of more than one block, and layers that differ
        (1, [(1, 5, 3), (3, 1, 7)]),  # pages of odd numbers of words
    ],
)
def test_pages_of_all_layers(device, dtype, page_size, shapes, by_kernel):
    """Guards against a layer, keys or values left out, half a page, and pages of the wrong tensor."""
    storage = storage_of(device, dtype, page_size, shapes)
    expected = [tensor.clone() for tensor in (*storage.keys, *storage.values)]
    sources, targets = (torch.tensor(pages, device=device) for pages in ([2, 5, 2], [6, 1, 3]))
    for tensor in expected:
        tensor[[6, 1, 3]] = tensor[[2, 5, 2]]
    if by_kernel:
        sizes = storage._starts, storage._page_sizes, storage._largest_page
        copy_pages(storage._words, *sizes, sources, targets)
    else:
        storage.copy_pages(sources, targets)
    for tensor, wanted in zip((*storage.keys, *storage.values), expected, strict=True):
        assert torch.equal(tensor, wanted)
