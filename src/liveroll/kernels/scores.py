"""Biases, penalties, exclusions and temperature: from logits to the scores that are filtered and drawn from.

One pass over the vocabulary. The arithmetic is that of `liveroll.decode.sampler` operation by operation, without fused
multiply-adds and with a division that rounds, so that the scores are the same to the last bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liveroll.decode.state import IN_RESPONSE, Column, RowState, Setting

BLOCK = 4096
"""Tokens that one program takes."""


class Scores(NamedTuple):
    """Scores of B rows, and what is known of them.

    Attributes:
        values: `[B, W]` float32, W ids that may be sampled.
        tops: `[B, blocks]` float32, the largest of each block.
        sums: `[B, blocks]` float32, the sum of each block's scores, but for those that are infinite or masked.
        counts: `[B, blocks]` int32, how many those are.
        found: `[B]` int32 zeros.
    """

    values: Tensor
    tops: Tensor
    sums: Tensor
    counts: Tensor
    found: Tensor


@triton.jit
def _score_block(
    logits, scores, tops, sums, counts, found, slots, numbers, settings, history, adjusted, bias, until,
    logits_stride, history_stride, width, adjusted_width,
    COLUMNS: tl.constexpr, DONE: tl.constexpr, SETTINGS: tl.constexpr, SHARPNESS: tl.constexpr,
    REPETITION: tl.constexpr, PRESENCE: tl.constexpr, FREQUENCY: tl.constexpr, IN_RESPONSE: tl.constexpr,
    ADJUSTED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    start = block * BLOCK
    index = start + tl.arange(0, BLOCK)
    inside = index < width
    score = tl.load(logits + row.to(tl.int64) * logits_stride + index, mask=inside, other=float("-inf")).to(tl.float32)

    # Adjusted tokens are listed in order: those of this block stand beside one another.
    entry = tl.arange(0, ADJUSTED)
    listed = tl.load(adjusted + slot * adjusted_width + entry, mask=entry < adjusted_width, other=2147483647)
    first = tl.sum((listed < start).to(tl.int32), 0)
    last = tl.sum((listed < start + BLOCK).to(tl.int32), 0)
    done = tl.load(numbers + slot * COLUMNS + DONE)
    for at in range(first, last):
        place = slot * adjusted_width + at
        added = tl.where(tl.load(until + place) > done, float("-inf"), tl.load(bias + place))
        score = tl.where(index == tl.load(adjusted + place), score + added, score)

    own = settings + slot * SETTINGS
    repetition, presence, frequency = tl.load(own + REPETITION), tl.load(own + PRESENCE), tl.load(own + FREQUENCY)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        seen = tl.load(history + slot * history_stride + index, mask=inside, other=0)
        repeated = tl.where(score < 0.0, score * repetition, tl.div_rn(score, repetition))
        score = tl.where(seen > 0, repeated, score)
        times = seen // IN_RESPONSE
        score = score - times.to(tl.float32) * frequency
        score = score - tl.where(times > 0, presence, 0.0)
    # What a model or a bias masks by a large number would say nothing of how far down the others' scores go.
    masked = score < -5000.0
    score = score * tl.load(own + SHARPNESS)
    score = tl.where(score == 0.0, 0.0, score)  # the two zeros are equal, and so must be their bits
    tl.store(scores + row.to(tl.int64) * width + index, score, mask=inside)

    counted = inside & ~masked & (score > float("-inf")) & (score < float("inf"))
    at = row * BLOCKS + block
    tl.store(tops + at, tl.max(tl.where(inside, score, float("-inf")), 0))
    tl.store(sums + at, tl.sum(tl.where(counted, score, 0.0), 0))
    tl.store(counts + at, tl.sum(counted.to(tl.int32), 0))
    if block == 0:
        tl.store(found + row, 0)


def score(logits: Tensor, state: RowState, slots: Tensor) -> Scores:
    """Scores of the ids that may be sampled.

    Args:
        logits: `[B, V]` of any float dtype, the last dimension contiguous.
        state: the settings and histories of slots.
        slots: `[B]` int64.
    """
    rows, width, device = len(logits), state.sampled_size, logits.device
    blocks = triton.cdiv(width, BLOCK)
    values = torch.empty(rows, width, dtype=torch.float32, device=device)
    tops, sums = torch.empty(2, rows, blocks, dtype=torch.float32, device=device)
    counts = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    found = torch.empty(rows, dtype=torch.int32, device=device)
    assert state.history is not None
    _score_block[(rows, blocks)](
        logits, values, tops, sums, counts, found, slots, state.numbers, state.settings, state.history,
        state.adjusted, state.bias, state.until,
        logits.stride(0), state.history.stride(0), width, state.adjusted.shape[1],
        COLUMNS=len(Column), DONE=int(Column.DONE), SETTINGS=len(Setting), SHARPNESS=int(Setting.SHARPNESS),
        REPETITION=int(Setting.REPETITION), PRESENCE=int(Setting.PRESENCE), FREQUENCY=int(Setting.FREQUENCY),
        IN_RESPONSE=IN_RESPONSE, ADJUSTED=max(1, triton.next_power_of_2(state.adjusted.shape[1])),
        BLOCKS=blocks, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return Scores(values, tops, sums, counts, found)
