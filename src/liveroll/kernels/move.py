"""Rows moved on by one token, and what the host is told of it, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from liveroll.decode.state import IN_RESPONSE, Column
from liveroll.scheduling.plan import Outcome


@triton.jit
def _move(
    numbers, stops, slots, tokens, logprobs, history, report, count, stop_width, history_stride,
    COLUMNS: tl.constexpr, STOPS: tl.constexpr, KEPT: tl.constexpr, IN_RESPONSE: tl.constexpr,
    TOKEN: tl.constexpr, POSITION: tl.constexpr, REMAINING: tl.constexpr, DONE: tl.constexpr,
    RUNNING: tl.constexpr, STOPPED: tl.constexpr, SPENT: tl.constexpr, IDLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    token = tl.load(tokens + row)
    at = numbers + slot * COLUMNS
    stop = tl.arange(0, STOPS)
    listed = tl.load(stops + slot * stop_width + stop, mask=stop < stop_width, other=-1)
    stopped = tl.sum((listed == token).to(tl.int32), 0) > 0
    before = tl.load(at + REMAINING)
    outcome = IDLE
    if before > 0:
        remaining = tl.where(stopped, 0, before - 1)
        outcome = tl.where(stopped, STOPPED, tl.where(remaining > 0, RUNNING, SPENT))
        tl.store(at + DONE, tl.load(at + DONE) + 1)
        tl.store(at + POSITION, tl.load(at + POSITION) + 1)
        tl.store(at + TOKEN, token)
        tl.store(at + REMAINING, remaining)
        if KEPT:
            seen = history + slot * history_stride + token
            tl.store(seen, tl.load(seen) + IN_RESPONSE)
    tl.store(report + row, token.to(tl.int32))
    tl.store(report + count + row, outcome)
    tl.store(report + 2 * count + row, tl.load(logprobs + row).to(tl.int32, bitcast=True))


def move(
    numbers: Tensor, stops: Tensor, slots: Tensor, tokens: Tensor, logprobs: Tensor, history: Tensor | None
) -> Tensor:
    """Move each slot on to the token that it sampled; frozen ones stay as they are.

    No two entries of `slots` are of one running row.

    Args:
        numbers: `[slots, columns]` int64 of the running batch, changed in place.
        stops: `[slots, S]` int64 stop tokens, -1 for none.
        slots: `[B]` int64.
        tokens: `[B]` int64.
        logprobs: `[B]` float32.
        history: `[slots, V]` int32, changed in place, or None.

    Returns:
        The first rows of the report of `liveroll.decode.advance.advance`, `[3, B]` int32.
    """
    report = torch.empty(3, len(slots), dtype=torch.int32, device=slots.device)
    _move[(len(slots),)](
        numbers, stops, slots, tokens, logprobs, numbers if history is None else history, report,
        len(slots), stops.shape[1], 0 if history is None else history.stride(0),
        COLUMNS=numbers.shape[1], STOPS=max(1, triton.next_power_of_2(stops.shape[1])),
        KEPT=history is not None, IN_RESPONSE=IN_RESPONSE,
        TOKEN=int(Column.TOKEN), POSITION=int(Column.POSITION), REMAINING=int(Column.REMAINING), DONE=int(Column.DONE),
        RUNNING=int(Outcome.RUNNING), STOPPED=int(Outcome.STOPPED), SPENT=int(Outcome.SPENT), IDLE=int(Outcome.IDLE),
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return report
