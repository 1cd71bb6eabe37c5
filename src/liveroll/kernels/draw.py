"""One draw a row over the whole vocabulary: Gumbel noise, argmax and log-probability in one pass.

The noise is that of `liveroll.decode.noise`, bit for bit before the logarithms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from liveroll.decode.state import Column, RowState, Setting

BLOCK = 4096
"""Tokens that one program takes."""


class Source(NamedTuple):
    """What rows are drawn from: logits, and the temperatures of their slots; or scores, and what is kept of them.

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
        kept: `[B, blocks]` int32, how many tokens of each block could be drawn.
    """

    tokens: Tensor
    logprobs: Tensor
    totals: Tensor
    kept: Tensor


@triton.jit
def load_scores(
    values, bounds, edges, slots, settings, row, index, width, stride,
    BOUNDED: tl.constexpr, SETTINGS: tl.constexpr, SHARPNESS: tl.constexpr,
):  # fmt: skip
    """Scores of a row's tokens, -inf where a token may not be drawn; one that is not a number stays, and shows."""
    score = tl.load(values + row.to(tl.int64) * stride + index, mask=index < width, other=float("-inf")).to(tl.float32)
    if BOUNDED:
        bound, edge = tl.load(bounds + row), tl.load(edges + row)
        score = tl.where((score < bound) | ((score == bound) & (index < edge)), float("-inf"), score)
    else:
        score = score * tl.load(settings + tl.load(slots + row) * SETTINGS + SHARPNESS)
    return score


@triton.jit
def _mix(word):
    word ^= word >> 16
    word *= 0x85EBCA6B
    word ^= word >> 13
    word *= 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def _log(x, DEVICE: tl.constexpr):
    """The logarithm; on a GPU by its own instruction, with an error of 2^-22 of log2 (PTX ISA, lg2.approx)."""
    if DEVICE:
        result = 0.6931471805599453 * tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = tl.log(x)
    return result


@triton.jit
def _gumbel(low, high, position, index, DEVICE: tl.constexpr):
    key = _mix(low ^ (position * 0x9E3779B9))
    key = _mix(key ^ high)
    word = _mix(_mix((index.to(tl.uint32) * 0x9E3779B9) ^ key) ^ low)
    uniform = ((word & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    uniform = tl.minimum(uniform, 0.99999994)
    # log1p(-u): for small u the first terms of its series are exact to float32, and 1 - u would lose its digits.
    exact = -_log(1.0 - uniform, DEVICE)
    series = tl.fma(uniform, tl.fma(uniform, tl.fma(uniform, 0.25, 0.3333333333333333), 0.5), 1.0) * uniform
    return -_log(tl.where(uniform < 0.01, series, exact), DEVICE)


@triton.jit
def _sum_exp(score):
    """The largest score, and the sum of the exponentials of the others' distances from it."""
    largest = tl.max(score, 0)
    # A block in which every token is excluded has no sum.
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, tl.sum(tl.exp(score - finite), 0)


@triton.jit
def _draw_block(
    values, bounds, edges, logits, slots, numbers, settings, best, token, chosen, top, total, kept, raw_top, raw_total,
    stride, width, logits_stride, vocab,
    BOUNDED: tl.constexpr, RAW: tl.constexpr, COLUMNS: tl.constexpr, POSITION: tl.constexpr, SAMPLED: tl.constexpr,
    STREAM_LOW: tl.constexpr, STREAM_HIGH: tl.constexpr, SETTINGS: tl.constexpr, SHARPNESS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, DEVICE: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    at = row * BLOCKS + block
    score = load_scores(values, bounds, edges, slots, settings, row, index, width, stride, BOUNDED, SETTINGS, SHARPNESS)
    largest, summed = _sum_exp(score)
    tl.store(top + at, largest)
    tl.store(total + at, summed)
    tl.store(kept + at, tl.sum((score > float("-inf")).to(tl.int32), 0))
    noisy = score
    own = numbers + tl.load(slots + row) * COLUMNS
    if (tl.load(own + SAMPLED) != 0) & (largest > float("-inf")):
        low, high = tl.load(own + STREAM_LOW).to(tl.uint32), tl.load(own + STREAM_HIGH).to(tl.uint32)
        noisy = score + _gumbel(low, high, (tl.load(own + POSITION) + 1).to(tl.uint32), index, DEVICE)
    highest, where = tl.max(noisy, 0, return_indices=True)
    tl.store(best + at, highest)
    tl.store(token + at, block * BLOCK + where)
    tl.store(chosen + at, tl.sum(tl.where(tl.arange(0, BLOCK) == where, score, 0.0), 0))
    if RAW:
        raw = tl.load(
            logits + row.to(tl.int64) * logits_stride + index, mask=index < vocab, other=float("-inf")
        ).to(tl.float32)  # fmt: skip
        largest, summed = _sum_exp(raw)
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
    logits, best, token, chosen, top, total, raw_top, raw_total, tokens, logprobs, totals, raw_logprobs,
    logits_stride, width,
    RAW: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS_P)
    at = row * BLOCKS + block
    _, winner = tl.max(tl.load(best + at, mask=block < BLOCKS, other=float("-inf")), 0, return_indices=True)
    # Where no score is a number any place may win, one behind the vocabulary too.
    drawn = tl.minimum(tl.load(token + row * BLOCKS + winner), width - 1)
    tl.store(tokens + row, drawn.to(tl.int64))
    highest, rest = _log_sum(top, total, row, BLOCKS, BLOCKS_P)
    tl.store(logprobs + row, tl.load(chosen + row * BLOCKS + winner) - highest - rest)
    tl.store(totals + row, highest + rest)
    if RAW:
        highest, rest = _log_sum(raw_top, raw_total, row, BLOCKS, BLOCKS_P)
        logit = tl.load(logits + row.to(tl.int64) * logits_stride + drawn).to(tl.float32)
        tl.store(raw_logprobs + row, logit - highest - rest)


def draw(logits: Tensor, source: Source, state: RowState, slots: Tensor, raw_logprobs: Tensor | None) -> Draw:
    """Draw one token a row.

    Args:
        logits: `[B, V]` of any float dtype, the last dimension contiguous.
        source: what to draw from.
        state: the settings of slots.
        slots: `[B]` int64.
        raw_logprobs: `[B]` float32, filled with the log-probabilities in the softmax of the logits; or None.
    """
    (rows, vocab), device, raw = logits.shape, logits.device, raw_logprobs is not None
    blocks = triton.cdiv(vocab if raw else source.width, BLOCK)
    best, chosen, top, total, raw_top, raw_total = torch.empty(6, rows, blocks, dtype=torch.float32, device=device)
    token, kept = torch.empty(2, rows, blocks, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs, totals = torch.empty(2, rows, dtype=torch.float32, device=device)
    bounds, edges = source.bounds or (logprobs, token)
    _draw_block[(rows, blocks)](
        source.values, bounds, edges, logits, slots, state.numbers, state.settings,
        best, token, chosen, top, total, kept, raw_top, raw_total,
        source.values.stride(0), source.width, logits.stride(0), vocab,
        BOUNDED=source.bounds is not None, RAW=raw,
        COLUMNS=len(Column), POSITION=int(Column.POSITION), SAMPLED=int(Column.SAMPLED),
        STREAM_LOW=int(Column.STREAM_LOW), STREAM_HIGH=int(Column.STREAM_HIGH),
        SETTINGS=len(Setting), SHARPNESS=int(Setting.SHARPNESS), BLOCKS=blocks, BLOCK=BLOCK,
        # A score that were fused with its noise would not be the one that the filters see.
        DEVICE=logits.is_cuda, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _draw_row[(rows,)](
        logits, best, token, chosen, top, total, raw_top, raw_total, tokens, logprobs, totals,
        totals if raw_logprobs is None else raw_logprobs, logits.stride(0), source.width,
        RAW=raw, BLOCKS=blocks, BLOCKS_P=triton.next_power_of_2(blocks), num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return Draw(tokens, logprobs, totals, kept)
