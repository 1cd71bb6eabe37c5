"""Where a decode step writes keys and values: each row at its own next position, the filler to the scratch page."""

from __future__ import annotations

import numpy as np
import torch
from fake_device import make_request
from zoo import shared

from liveroll.attention.reference import ReferenceAttention
from liveroll.decode.feeding import TunedForward
from liveroll.decode.sampler import Variant
from liveroll.decode.state import Column, RowState
from liveroll.decode.step import decode
from liveroll.kv.storage import PagedStorage
from liveroll.model.fusion import Fusion
from liveroll.model.guard import ModelGuard
from liveroll.model.probe import probe
from liveroll.scheduling.plan import Outcome

SIZE = 4
CPU = torch.device("cpu")


def test_rows_write_at_their_next_position():
    """Guards against a filler, or a row that stopped, which writes over what is not its own."""
    model = shared("llama")
    guard = ModelGuard(model, training=False)
    with guard.rollout(), guard.our_attention():
        shape, dtype = probe(model)
        storage = PagedStorage(shape.layers, 6, SIZE, dtype, CPU)
        state = RowState(2, table_width=2, stop_width=1, vocab_size=shape.vocab_size, device=CPU)
        running, stopped = (make_request(row, prompt, 9) for row, prompt in enumerate((6, 3)))
        for slot, request in enumerate((running, stopped)):
            request.slot = slot
        state.admit([running, stopped])
        # Slot 0 has sampled its next token; slot 1 has stopped at its first.
        state.numbers[:2, Column.POSITION] += 1
        state.numbers[1, Column.REMAINING] = 0
        state.load_table(np.array([[3, 5], [1, 2]], np.int32))
        before = [tensor.clone() for tensor in (*storage.keys, *storage.values)]
        slots = torch.tensor([0, 1, state.inert, state.inert])
        report = decode(
            TunedForward(model, False, Fusion(model, False)),
            state,
            slots,
            storage,
            ReferenceAttention(),
            7,
            Variant.PLAIN,
        )
    assert report[1].tolist() == [Outcome.RUNNING, Outcome.IDLE, Outcome.IDLE, Outcome.IDLE]
    for old, new in zip(before, (*storage.keys, *storage.values), strict=True):
        written = (old != new).flatten(2).any(dim=2)
        assert written.nonzero().tolist() == [[0, 0], [1, 3], [5, 2]]
