"""What is reported of drawn tokens on request: the most likely alternatives, and the ids that truncation kept."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from liveroll.decode.state import RowState, Setting
from liveroll.kernels.draw import BLOCK, Draw, Source, load_scores


@triton.jit
def _rank_block(
    values, bounds, edges, slots, settings, best, ids, stride, width, count,
    BOUNDED: tl.constexpr, SETTINGS: tl.constexpr, SHARPNESS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    score = load_scores(
        values, bounds, edges, slots, settings, row, block, width, stride, BOUNDED, SETTINGS, SHARPNESS, BLOCK
    )
    at = (row * BLOCKS + block) * count
    for rank in range(count):
        highest, where = tl.max(score, 0, return_indices=True)
        tl.store(best + at + rank, highest)
        tl.store(ids + at + rank, block * BLOCK + where)
        score = tl.where(place == where, float("-inf"), score)


@triton.jit(do_not_specialize=["rows"])
def _rank_row(best, ids, totals, found, logprobs, rows, candidates, count, CANDIDATES: tl.constexpr):
    row = tl.program_id(0)
    place = tl.arange(0, CANDIDATES)
    # Blocks are in the order of their tokens, so that equal scores stay in the order of their ids.
    score = tl.load(best + row * candidates + place, mask=place < candidates, other=float("-inf"))
    total = tl.load(totals + row)
    for rank in range(count):
        highest, where = tl.max(score, 0, return_indices=True)
        tl.store(found + rank * rows + row, tl.load(ids + row * candidates + where))
        tl.store(logprobs + rank * rows + row, highest - total)
        score = tl.where(place == where, float("-inf"), score)


def rank(source: Source, draw: Draw, state: RowState, slots: Tensor, ids: Tensor, logprobs: Tensor) -> None:
    """Find the most likely tokens, one after the other.

    Args:
        source: what was drawn from.
        draw: what was drawn.
        state: the settings of slots.
        slots: `[B]` int64.
        ids: `[N, B]` int32, filled with the ids of the N most likely tokens, of equal ones the lowest first.
        logprobs: `[N, B]` float32, filled with their log-probabilities, -inf where fewer are possible.
    """
    (count, rows), blocks, device = ids.shape, triton.cdiv(source.width, BLOCK), slots.device
    best = torch.empty(rows, blocks, count, dtype=torch.float32, device=device)
    candidates = torch.empty(rows, blocks, count, dtype=torch.int32, device=device)
    bounds, edges = source.bounds or (best, candidates)
    _rank_block[(rows, blocks)](
        source.values, bounds, edges, slots, state.settings, best, candidates,
        source.values.stride(0), source.width, count,
        BOUNDED=source.bounds is not None, SETTINGS=len(Setting), SHARPNESS=int(Setting.SHARPNESS),
        BLOCKS=blocks, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip
    _rank_row[(rows,)](
        best, candidates, draw.totals, ids, logprobs, rows, blocks * count, count,
        CANDIDATES=triton.next_power_of_2(blocks * count), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "limit"])
def _list_block(
    values, bounds, edges, slots, settings, kept, counts, ids, stride, width, rows, limit,
    BOUNDED: tl.constexpr, SETTINGS: tl.constexpr, SHARPNESS: tl.constexpr,
    COUNTED: tl.constexpr, BLOCKS_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    other = tl.arange(0, BLOCKS_P)
    count = tl.load(kept + row * COUNTED + other, mask=other < COUNTED, other=0)
    total = tl.sum(count, 0)
    if block == 0:
        tl.store(counts + row, total)
    if total <= limit:
        index = block * BLOCK + tl.arange(0, BLOCK)
        score = load_scores(
            values, bounds, edges, slots, settings, row, block, width, stride, BOUNDED, SETTINGS, SHARPNESS, BLOCK
        )
        chosen = score > float("-inf")
        place = tl.sum(tl.where(other < block, count, 0), 0) + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(ids + place * rows + row, index, mask=chosen)


def list_kept(source: Source, draw: Draw, state: RowState, slots: Tensor, counts: Tensor, ids: Tensor) -> None:
    """List the tokens that could be drawn.

    Args:
        source: what was drawn from.
        draw: what was drawn.
        state: the settings of slots.
        slots: `[B]` int64.
        counts: `[B]` int32, filled with how many those are.
        ids: `[K, B]` int32, filled with their ids, ascending, where they are at most K.
    """
    limit, rows = ids.shape
    counted = draw.kept.shape[1]
    bounds, edges = source.bounds or (draw.logprobs, draw.kept)
    _list_block[(rows, triton.cdiv(source.width, BLOCK))](
        source.values, bounds, edges, slots, state.settings, draw.kept, counts, ids,
        source.values.stride(0), source.width, rows, limit,
        BOUNDED=source.bounds is not None, SETTINGS=len(Setting), SHARPNESS=int(Setting.SHARPNESS),
        COUNTED=counted, BLOCKS_P=triton.next_power_of_2(counted), BLOCK=BLOCK, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip
