"""The two scores that the bound of a row lies between: passes over the vocabulary that add up what reaches pivots."""

from __future__ import annotations

import triton
import triton.language as tl

from liveroll.kernels.mass import find_goal, mass


@triton.jit
def find_extent(tops, sums, counts, row, BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr):
    """The largest score of a row, and twice its distance from the mean: about how far down scores go."""
    block = tl.arange(0, BLOCKS_P)
    at, inside = row * BLOCKS + block, block < BLOCKS
    top = tl.max(tl.load(tops + at, mask=inside, other=float("-inf")), 0)
    total = tl.sum(tl.load(sums + at, mask=inside, other=0.0), 0)
    count = tl.sum(tl.load(counts + at, mask=inside, other=0), 0)
    return top, 2.0 * (top - total / tl.maximum(count, 1).to(tl.float32))


@triton.jit
def _pivots(low, high, top, reach, PASS: tl.constexpr, PIVOTS: tl.constexpr):
    at = tl.arange(0, PIVOTS).to(tl.float32)
    if PASS == 0:
        return tl.where(at == 0.0, float("-inf"), top - reach * (1.0 - at / PIVOTS))
    ceiling = tl.minimum(high, top)
    floor = tl.maximum(low, ceiling - 8.0 * reach)
    return floor + (ceiling - floor) * ((at + 1.0) / (PIVOTS + 1))


@triton.jit
def find_bracket(
    partial, row, rows, width, k, tail, top, reach, PASSES: tl.constexpr, PIVOTS: tl.constexpr, SPLITS: tl.constexpr
):
    """Scores that the bound lies between, what reaches the higher and the lower, and the goal, after some passes."""
    low, high = tl.full([], float("-inf"), tl.float32), tl.full([], float("inf"), tl.float32)
    above, reaching = tl.full([], 0, tl.int64), tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    goal = tl.minimum(k, width)
    split, pivot = tl.arange(0, SPLITS), tl.arange(0, PIVOTS)
    for done in tl.static_range(PASSES):
        scores = _pivots(low, high, top, reach, done, PIVOTS)
        at = ((done * rows + row) * SPLITS + split[:, None]) * PIVOTS + pivot[None, :]
        sums = above + tl.sum(tl.load(partial + at), 0)
        if done == 0:
            # The first pivot is below everything.
            goal = tl.where(k > 0, goal, find_goal(tl.sum(tl.where(pivot == 0, sums, 0), 0), tail))
        reached = sums >= goal
        low = tl.maximum(low, tl.max(tl.where(reached, scores, float("-inf")), 0))
        high = tl.minimum(high, tl.min(tl.where(reached, float("inf"), scores), 0))
        above = tl.maximum(above, tl.max(tl.where(reached, 0, sums), 0))
        reaching = tl.minimum(reaching, tl.min(tl.where(reached, sums, 0x7FFFFFFFFFFFFFFF), 0))
    return low, high, above, reaching, goal


@triton.jit(do_not_specialize=["rows"])
def sum_at_pivots(
    scores, tops, sums, counts, partial, slots, numbers, settings, width, rows,
    PASS: tl.constexpr, COLUMNS: tl.constexpr, TOP_K: tl.constexpr, SETTINGS: tl.constexpr, TAIL: tl.constexpr,
    PIVOTS: tl.constexpr, SPLITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store the number or mass of the tokens of a row's part that reach each pivot of a pass."""
    row, split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    k, tail = tl.load(numbers + slot * COLUMNS + TOP_K), tl.load(settings + slot * SETTINGS + TAIL)
    if (k > 0) | (tail > 0.0):
        top, reach = find_extent(tops, sums, counts, row, BLOCKS, BLOCKS_P)
        low, high, _, _, _ = find_bracket(partial, row, rows, width, k, tail, top, reach, PASS, PIVOTS, SPLITS)
        pivot = _pivots(low, high, top, reach, PASS, PIVOTS)
        share = tl.cdiv(width, SPLITS * CHUNK) * CHUNK
        end = tl.minimum((split + 1) * share, width)
        # Each thread adds up its own tokens for all pivots, until the end.
        total = tl.zeros([PIVOTS, CHUNK], tl.int64)
        for start in range(split * share, end, CHUNK):
            index = start + tl.arange(0, CHUNK)
            score = tl.load(scores + row.to(tl.int64) * width + index, mask=index < end, other=float("-inf"))
            within = (index < end) & (score >= low) & (score < high)
            if tl.max(within.to(tl.int32), 0) > 0:
                amount = within.to(tl.int64)
                if k == 0:
                    amount = tl.where(within, mass(score, top), 0)
                total += tl.where(score[None, :] >= pivot[:, None], amount[None, :], 0)
        tl.store(partial + ((PASS * rows + row) * SPLITS + split) * PIVOTS + tl.arange(0, PIVOTS), tl.sum(total, 1))
