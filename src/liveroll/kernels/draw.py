"""One draw a row over the whole vocabulary: Gumbel noise, argmax and log-probability in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liveroll.decode.state import Column, RowState, Setting
from liveroll.kernels.noise import add_noise, exp2

BLOCK = 4096
"""Tokens that one program takes."""


class Source(NamedTuple):
    """What rows are drawn from: logits, with the temperatures of their slots; or scores, and what is kept of them.

    Attributes:
        values: `[B, >= width]`, of any float dtype, the last dimension contiguous.
        width: ids that may be drawn.
        bounds: `[B]` float32 and edges: `[B]` int32, as `find_bounds` gives them; None for logits.
    """

    values: Tensor
    width: int
    bounds: tuple[Tensor, Tensor] | None


class Draw(NamedTuple):
    """What was drawn for B rows.

    Attributes:
        tokens: `[B]` int64.
        logprobs: `[B]` float32, in the distribution drawn from.
        totals: `[B]` float32, the logarithm of its normaliser.
        kept: `[B, blocks]` int32, how many tokens of each block could be drawn; undefined unless it was asked for.
    """

    tokens: Tensor
    logprobs: Tensor
    totals: Tensor
    kept: Tensor


@triton.jit
def _to_scores(
    value, bounds, edges, slots, settings, row, index,
    BOUNDED: tl.constexpr, SETTINGS: tl.constexpr, SHARPNESS: tl.constexpr,
):  # fmt: skip
    """Scores of a row's tokens, -inf where a token may not be drawn; one that is not a number stays, and shows."""
    score = value.to(tl.float32)
    if BOUNDED:
        bound, edge = tl.load(bounds + row), tl.load(edges + row)
        score = tl.where((score < bound) | ((score == bound) & (index < edge)), float("-inf"), score)
    else:
        score = score * tl.load(settings + tl.load(slots + row) * SETTINGS + SHARPNESS)
    return score


@triton.jit
def load_scores(
    values, bounds, edges, slots, settings, row, block, width, stride,
    BOUNDED: tl.constexpr, SETTINGS: tl.constexpr, SHARPNESS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores of a block of a row's tokens, -inf behind the last too."""
    index = block * BLOCK + tl.arange(0, BLOCK)
    at = values + row.to(tl.int64) * stride + index
    # All blocks but the last are read without a look at where the vocabulary ends.
    value = tl.load(at) if (block + 1) * BLOCK <= width else tl.load(at, mask=index < width, other=float("-inf"))
    return _to_scores(value, bounds, edges, slots, settings, row, index, BOUNDED, SETTINGS, SHARPNESS)


@triton.jit
def _sum_exp(score, DEVICE: tl.constexpr):
    """The largest score, and the sum of the exponentials of the others' distances from it."""
    largest = tl.max(score, 0)
    # A block in which every token is excluded has no sum.
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, tl.sum(exp2((score - finite) * 1.4426950408889634, DEVICE), 0)


@triton.jit
def _draw_block(
    values, bounds, edges, logits, slots, numbers, settings, best, pieces, top, total, kept, raw_top, raw_total,
    stride, width, logits_stride, vocab,
    BOUNDED: tl.constexpr, COUNTED: tl.constexpr, RAW: tl.constexpr,
    COLUMNS: tl.constexpr, POSITION: tl.constexpr, SAMPLED: tl.constexpr, STREAM_LOW: tl.constexpr,
    STREAM_HIGH: tl.constexpr, SETTINGS: tl.constexpr, SHARPNESS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, DEVICE: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    at = row * BLOCKS + block
    score = load_scores(
        values, bounds, edges, slots, settings, row, block, width, stride, BOUNDED, SETTINGS, SHARPNESS, BLOCK
    )
    largest, summed = _sum_exp(score, DEVICE)
    tl.store(top + at, largest)
    tl.store(total + at, summed)
    if COUNTED:
        tl.store(kept + at, tl.sum((score > float("-inf")).to(tl.int32), 0))
    noisy = score
    if largest > float("-inf"):
        noisy = add_noise(
            score, slots, numbers, row, index, COLUMNS, POSITION, SAMPLED, STREAM_LOW, STREAM_HIGH, DEVICE
        )
    # Which token of its piece is the best is looked for once a row, and not once a thread.
    highest, where = tl.max(tl.max(noisy.reshape(BLOCK // PIECE, PIECE), 1), 0, return_indices=True)
    tl.store(best + at, highest)
    tl.store(pieces + at, block * BLOCK + where * PIECE)
    if RAW:
        raw = tl.load(
            logits + row.to(tl.int64) * logits_stride + index, mask=index < vocab, other=float("-inf")
        ).to(tl.float32)  # fmt: skip
        largest, summed = _sum_exp(raw, DEVICE)
        tl.store(raw_top + at, largest)
        tl.store(raw_total + at, summed)


@triton.jit
def _log_sum(top, total, row, BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr):
    block = tl.arange(0, BLOCKS_P)
    inside = block < BLOCKS
    largest = tl.load(top + row * BLOCKS + block, mask=inside, other=float("-inf"))
    highest = tl.max(largest, 0)
    summed = tl.sum(tl.load(total + row * BLOCKS + block, mask=inside, other=0.0) * tl.exp(largest - highest), 0)
    return highest, tl.log(summed)


@triton.jit
def _draw_row(
    values, bounds, edges, logits, slots, numbers, settings, best, pieces, top, total, raw_top, raw_total,
    tokens, logprobs, totals, raw_logprobs, stride, width, logits_stride,
    BOUNDED: tl.constexpr, RAW: tl.constexpr,
    COLUMNS: tl.constexpr, POSITION: tl.constexpr, SAMPLED: tl.constexpr, STREAM_LOW: tl.constexpr,
    STREAM_HIGH: tl.constexpr, SETTINGS: tl.constexpr, SHARPNESS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr, PIECE: tl.constexpr, DEVICE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    block, place = tl.arange(0, BLOCKS_P), tl.arange(0, PIECE)
    best_of = tl.load(best + row * BLOCKS + block, mask=block < BLOCKS, other=float("-inf"))
    _, winner = tl.max(best_of, 0, return_indices=True)
    first = tl.load(pieces + row * BLOCKS + winner)
    index = first + place
    value = tl.load(values + row.to(tl.int64) * stride + index, mask=index < width, other=float("-inf"))
    score = _to_scores(value, bounds, edges, slots, settings, row, index, BOUNDED, SETTINGS, SHARPNESS)
    noisy = add_noise(score, slots, numbers, row, index, COLUMNS, POSITION, SAMPLED, STREAM_LOW, STREAM_HIGH, DEVICE)
    _, where = tl.max(noisy, 0, return_indices=True)
    chosen = tl.sum(tl.where(place == where, score, 0.0), 0)
    # Where no score is a number any place may win, one behind the vocabulary too.
    drawn = tl.minimum(first + where, width - 1)
    tl.store(tokens + row, drawn.to(tl.int64))
    highest, rest = _log_sum(top, total, row, BLOCKS, BLOCKS_P)
    tl.store(logprobs + row, chosen - highest - rest)
    tl.store(totals + row, highest + rest)
    if RAW:
        highest, rest = _log_sum(raw_top, raw_total, row, BLOCKS, BLOCKS_P)
        logit = tl.load(logits + row.to(tl.int64) * logits_stride + drawn).to(tl.float32)
        tl.store(raw_logprobs + row, logit - highest - rest)


def draw(
    logits: Tensor, source: Source, state: RowState, slots: Tensor, raw_logprobs: Tensor | None, counted: bool = False
) -> Draw:
    """Draw one token a row.

    Args:
        logits: `[B, V]` of any float dtype, the last dimension contiguous.
        source: what to draw from.
        state: the settings of slots.
        slots: `[B]` int64.
        raw_logprobs: `[B]` float32, filled with the log-probabilities in the softmax of the logits; or None.
        counted: whether to count the tokens that could be drawn.
    """
    (rows, vocab), device, raw = logits.shape, logits.device, raw_logprobs is not None
    blocks = triton.cdiv(vocab if raw else source.width, BLOCK)
    best, top, total, raw_top, raw_total = torch.empty(5, rows, blocks, dtype=torch.float32, device=device)
    pieces, kept = torch.empty(2, rows, blocks, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs, totals = torch.empty(2, rows, dtype=torch.float32, device=device)
    bounds, edges = source.bounds or (logprobs, pieces)
    settings = {
        "BOUNDED": source.bounds is not None, "RAW": raw,
        "COLUMNS": len(Column), "POSITION": int(Column.POSITION), "SAMPLED": int(Column.SAMPLED),
        "STREAM_LOW": int(Column.STREAM_LOW), "STREAM_HIGH": int(Column.STREAM_HIGH),
        "SETTINGS": len(Setting), "SHARPNESS": int(Setting.SHARPNESS), "BLOCKS": blocks,
        # What a thread reads at once.
        "PIECE": 16 // source.values.itemsize, "DEVICE": logits.is_cuda,
        # A score that were fused with its noise would not be the one that the filters see.
        "enable_fp_fusion": False,
    }  # fmt: skip
    _draw_block[(rows, blocks)](
        source.values, bounds, edges, logits, slots, state.numbers, state.settings,
        best, pieces, top, total, kept, raw_top, raw_total,
        source.values.stride(0), source.width, logits.stride(0), vocab,
        COUNTED=counted, BLOCK=BLOCK, num_warps=4, **settings,
    )  # fmt: skip
    _draw_row[(rows,)](
        source.values, bounds, edges, logits, slots, state.numbers, state.settings,
        best, pieces, top, total, raw_top, raw_total,
        tokens, logprobs, totals, totals if raw_logprobs is None else raw_logprobs,
        source.values.stride(0), source.width, logits.stride(0),
        BLOCKS_P=triton.next_power_of_2(blocks), num_warps=1, **settings,
    )  # fmt: skip
    return Draw(tokens, logprobs, totals, kept)
