"""The beginning of every step: what is fed for each slot, and where its keys and values are."""

from __future__ import annotations

from torch import Tensor

from liveroll.attention.layout import PagedLayout, SharedPrefixes
from liveroll.decode.state import Column


def locate(
    numbers: Tensor,
    block_table: Tensor,
    slots: Tensor,
    page_size: int,
    longest: int,
    prefixes: SharedPrefixes | None = None,
) -> tuple[Tensor, Tensor, PagedLayout]:
    """Look up the last token of each slot, and where it stands.

    A row that stopped, unknown to the host yet, still has its pages and writes there; the inert slot has scratch.

    Args:
        numbers: `[slots, columns]` int64 of the running batch.
        block_table: `[slots, P]` int32 pages of each slot.
        slots: `[B]` int64.
        page_size: tokens in a page.
        longest: an upper bound of the rows' keys; the only value from the host.
        prefixes: which of the rows begin with the same pages, if that is of use.

    Returns:
        Tokens `[B, 1]` and positions `[B, 1]`, both int64, and the layout of the step.
    """
    if numbers.is_cuda:
        from liveroll.kernels.locate import locate as locate_fused

        tokens, positions, table, lengths, index = locate_fused(numbers, block_table, slots, page_size)
    else:
        tokens, positions, table, lengths, index = locate_plainly(numbers, block_table, slots, page_size)
    return tokens[:, None], positions[:, None], PagedLayout(table, lengths, index, longest, prefixes)


def locate_plainly(
    numbers: Tensor, block_table: Tensor, slots: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens, positions, keys and storage rows of the new tokens, `[B]` int64 each, behind the pages `[B, P]`."""
    rows, table = numbers[slots], block_table[slots]
    position = rows[:, Column.POSITION]
    page = table.gather(1, position[:, None] // page_size)[:, 0].long()
    index = page * page_size + position % page_size
    return rows[:, Column.TOKEN], position, table, position + 1, index
