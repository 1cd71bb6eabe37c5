"""What a decode step is fed and where it writes, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from liveroll.decode.state import Column

_BLOCK = 256


@triton.jit
def _locate(
    numbers, table, slots, found, pages, count, width, table_stride,
    COLUMNS: tl.constexpr, TOKEN: tl.constexpr, POSITION: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    column = part * BLOCK + tl.arange(0, BLOCK)
    listed = tl.load(table + slot * table_stride + column, mask=column < width, other=0)
    tl.store(pages + row * width + column, listed, mask=column < width)
    if part == 0:
        token = tl.load(numbers + slot * COLUMNS + TOKEN)
        position = tl.load(numbers + slot * COLUMNS + POSITION)
        page = tl.load(table + slot * table_stride + position // PAGE).to(tl.int64)
        tl.store(found + row, token)
        tl.store(found + count + row, position)
        tl.store(found + 2 * count + row, position + 1)
        tl.store(found + 3 * count + row, page * PAGE + position % PAGE)


def locate(
    numbers: Tensor, block_table: Tensor, slots: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `liveroll.decode.locate.locate_plainly` returns, for the same arguments."""
    count, width = len(slots), block_table.shape[1]
    found = torch.empty(4, count, dtype=torch.int64, device=slots.device)
    pages = torch.empty(count, width, dtype=torch.int32, device=slots.device)
    _locate[(count, triton.cdiv(width, _BLOCK))](
        numbers, block_table, slots, found, pages, count, width, block_table.stride(0),
        COLUMNS=numbers.shape[1], TOKEN=int(Column.TOKEN), POSITION=int(Column.POSITION),
        PAGE=page_size, BLOCK=_BLOCK, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    tokens, positions, lengths, index = found
    return tokens, positions, pages, lengths, index
