"""One decode step over static tensors: what is captured, and what runs where nothing is."""

from __future__ import annotations

from torch import Tensor

from liveroll.attention import interface
from liveroll.attention.backend import AttentionBackend
from liveroll.attention.calls import PagedCall
from liveroll.attention.layout import PagedLayout
from liveroll.decode.advance import advance
from liveroll.decode.feeding import DecodeForward
from liveroll.decode.sampler import Variant
from liveroll.decode.state import Column, RowState
from liveroll.kv.storage import PagedStorage
from liveroll.scheduling.details import NOTHING, Wanted


def decode(
    forward: DecodeForward,
    state: RowState,
    slots: Tensor,
    storage: PagedStorage,
    backend: AttentionBackend,
    longest: int,
    variant: Variant,
    wanted: Wanted = NOTHING,
) -> Tensor:
    """Feed the last token of each slot, sample its next one, and move it on.

    Args:
        forward: the model.
        state: the running batch.
        slots: `[B]` int64.
        storage: the KV pages.
        backend: attention over them.
        longest: an upper bound of the rows' keys; the only value from the host.
        variant: how much of sampling to run.
        wanted: what to report of each token besides its log-probability.

    Returns:
        The report of `advance`, `[3 + wanted.rows, B]` int32.
    """
    numbers = state.numbers[slots]
    position = numbers[:, Column.POSITION]
    table = state.block_table[slots]
    # A row that stopped, unknown to the host yet, still has its pages and writes there; the inert slot has scratch.
    page = table.gather(1, position[:, None] // storage.page_size)[:, 0].long()
    index = page * storage.page_size + position % storage.page_size
    layout = PagedLayout(table, position + 1, index, longest)
    with interface.bound(PagedCall(backend, storage, layout)):
        logits = forward(numbers[:, :1], position[:, None])
    return advance(state, slots, logits[:, -1], variant, wanted)
