"""The locating kernel does what the torch one does."""

import pytest
import torch

from liveroll.decode.locate import locate_plainly
from liveroll.decode.state import Column


@pytest.mark.parametrize(("width", "page_size"), [(1, 16), (5, 16), (300, 4), (513, 3)])
def test_same_tokens_pages_and_places(device, width, page_size):
    """Guards against rows of other slots, pages cut off behind a block, and places that are off by one."""
    from liveroll.kernels.locate import locate

    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 1000, (7, len(Column)), generator=generator)
    last = width * page_size - 1
    numbers[:, Column.POSITION] = torch.tensor([0, 1, page_size - 1, page_size, last // 2, last - 1, last]).clamp(
        0, last
    )
    table = torch.randint(0, 10_000, (7, width), generator=generator, dtype=torch.int32)
    slots = torch.tensor([6, 0, 3, 5, 1, 2, 4, 4])
    expected = locate_plainly(numbers, table, slots, page_size)
    found = locate(numbers.to(device), table.to(device), slots.to(device), page_size)
    for there, here in zip(found, expected, strict=True):
        assert there.dtype == here.dtype
        assert there.cpu().equal(here)
