"""Keys and values reach their pages, and nothing else is written."""

from __future__ import annotations

import pytest
import torch

from liveroll.kernels.kv_write import write_kv

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(("key_dtype", "value_dtype"), [(FP32, FP32), (FP32, BF16), (BF16, FP32)])
@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), [(2, 8, 8), (3, 24, 16), (1, 6, 10)])
def test_tokens_in_their_pages(device, heads, key_dim, value_dim, key_dtype, value_dtype):
    """Guards against a neighbour overwritten, and under autocast against values of another dtype read as bits."""
    generator = torch.Generator().manual_seed(0)
    pages = [torch.full((5, 4, heads, dim), -1.0, device=device) for dim in (key_dim, value_dim)]
    # As a model gives them: a permuted view, whose tokens are not contiguous.
    given = [
        torch.randn(heads, 6, dim, generator=generator).to(device, dtype).transpose(0, 1)
        for dim, dtype in ((key_dim, key_dtype), (value_dim, value_dtype))
    ]
    index = torch.tensor([7, 0, 19, 8, 3, 12], device=device)
    expected = [page.clone() for page in pages]
    for page, new in zip(expected, given, strict=True):
        page.view(20, heads, -1)[index] = new.float()
    write_kv(*given, *pages, index)
    for page, wanted in zip(pages, expected, strict=True):
        assert torch.equal(page, wanted)
