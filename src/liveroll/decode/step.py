"""One decode step over static tensors: what is captured, and what runs where nothing is."""

from __future__ import annotations

from torch import Tensor

from liveroll.attention import interface
from liveroll.attention.backend import AttentionBackend
from liveroll.attention.calls import PagedCall
from liveroll.attention.layout import SharedPrefixes
from liveroll.decode.advance import advance
from liveroll.decode.feeding import TunedForward
from liveroll.decode.locate import locate
from liveroll.decode.sampler import Variant
from liveroll.decode.state import RowState
from liveroll.kv.storage import PagedStorage
from liveroll.scheduling.details import NOTHING, Wanted


def decode(
    forward: TunedForward,
    state: RowState,
    slots: Tensor,
    storage: PagedStorage,
    backend: AttentionBackend,
    longest: int,
    variant: Variant,
    wanted: Wanted = NOTHING,
    prefixes: SharedPrefixes | None = None,
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
        prefixes: which of the rows begin with the same pages, where attention reads these once.

    Returns:
        The report of `advance`, `[3 + wanted.rows, B]` int32.
    """
    tokens, positions, layout = locate(state.numbers, state.block_table, slots, storage.page_size, longest, prefixes)
    with interface.bound(PagedCall(backend, storage, layout)):
        logits = forward(tokens, positions)
    return advance(state, slots, logits[:, -1], variant, wanted)
