"""The bound of what top-k, top-p and min-p keep, found without sorting: `liveroll.decode.truncation` on a GPU.

The bound is the largest score t such that the tokens that score t or more reach a goal: k tokens, or the mass that
top-p asks for. Two passes over the vocabulary, spread over the whole device, add up what reaches each of a few pivots,
the second between the two pivots of the first between which the bound lies. The few tokens left between the pivots
that come out of that are listed, each with its score and its mass, and one program a row narrows the interval down to
one score, by a few pivots at a time and over the list alone. Masses are whole numbers, so that the result does not
depend on the order in which anything is added; where pivots lie costs time and changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from liveroll.decode.state import Column, RowState, Setting
from liveroll.kernels.bracket import find_bracket, find_extent, sum_at_pivots
from liveroll.kernels.mass import find_goal, mass
from liveroll.kernels.scores import BLOCK, Scores

_PIVOTS = 8
_SPLITS = 16
_CHUNK = 1024
_WAYS = 4
# Where more tokens lie between the last pivots, as it is with many equal ones, the whole row is searched.
_CAPACITY = 16384


@triton.jit
def _key(score):
    """A whole number that orders as the scores do."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["rows"])
def _list(
    scores, tops, sums, counts, partial, found, ids, keys, amounts, slots, numbers, settings, width, rows,
    COLUMNS: tl.constexpr, TOP_K: tl.constexpr, SETTINGS: tl.constexpr, TAIL: tl.constexpr,
    PIVOTS: tl.constexpr, SPLITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr,
    BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    k, tail = tl.load(numbers + slot * COLUMNS + TOP_K), tl.load(settings + slot * SETTINGS + TAIL)
    if (k > 0) | (tail > 0.0):
        top, reach = find_extent(tops, sums, counts, row, BLOCKS, BLOCKS_P)
        low, high, _, _, _ = find_bracket(partial, row, rows, width, k, tail, top, reach, 2, PIVOTS, SPLITS)
        index = block * BLOCK + tl.arange(0, BLOCK)
        score = tl.load(scores + row.to(tl.int64) * width + index, mask=index < width, other=float("nan"))
        # Top-p after top-k looks at all that top-k keeps.
        high = tl.where((k > 0) & (tail > 0.0), float("inf"), high)
        listed = (score >= low) & (score < high)
        count = tl.sum(listed.to(tl.int32), 0)
        if count > 0:
            # The order of the list does not matter.
            place = tl.atomic_add(found + row, count) + tl.cumsum(listed.to(tl.int32), 0) - 1
            place, stored = row.to(tl.int64) * CAPACITY + place, listed & (place < CAPACITY)
            tl.store(ids + place, index, mask=stored)
            tl.store(keys + place, _key(score), mask=stored)
            if tail > 0.0:
                tl.store(amounts + place, mass(score, top), mask=stored)


@triton.jit
def _sum(
    scores, ids, keys, amounts, listed, width, low, high, key, pivots, top, MASS: tl.constexpr, TIES: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Number or mass of the tokens between two scores whose key reaches each pivot.

    Of ties, the tokens that have `key`, it is the id that reaches a pivot. Looks at the list; at the whole row if
    `listed` is 0.
    """
    total = tl.zeros([pivots.shape[0], CHUNK], tl.int64)
    if listed > 0:
        for start in range(0, listed, CHUNK):
            at = start + tl.arange(0, CHUNK)
            inside = at < listed
            own = tl.load(keys + at, mask=inside, other=0)
            if TIES:
                inside = inside & (own == key)
                own = tl.load(ids + at, mask=inside, other=0)
            else:
                inside = inside & (own < _key(high))
            amount = inside.to(tl.int64)
            if MASS:
                amount = tl.load(amounts + at, mask=inside, other=0)
            total += tl.where(own[None, :] >= pivots[:, None], amount[None, :], 0)
    else:
        for start in range(0, width, CHUNK):
            index = start + tl.arange(0, CHUNK)
            score = tl.load(scores + index, mask=index < width, other=float("nan"))
            own = _key(score)
            if TIES:
                inside = (score == score) & (own == key)
                own = index
            else:
                inside = (score >= low) & (score < high)
            amount = inside.to(tl.int64)
            if MASS:
                amount = tl.where(inside, mass(score, top), 0)
            total += tl.where(own[None, :] >= pivots[:, None], amount[None, :], 0)
    return tl.sum(total, 1)


@triton.jit
def _between(reached, missed, WAYS: tl.constexpr):
    """Whole numbers that part an interval evenly; at least one lies inside of one that is longer than 1."""
    return reached + (missed - reached) * (tl.arange(0, WAYS) + 1) // (WAYS + 1)


@triton.jit
def _narrow(reached, missed, pivots, enough):
    """The last pivot of an interval that is enough, and the first that is not."""
    return (
        tl.maximum(reached, tl.max(tl.where(enough, pivots, reached), 0)),
        tl.minimum(missed, tl.min(tl.where(enough, missed, pivots), 0)),
    )


@triton.jit
def _search(
    scores, ids, keys, amounts, listed, width, low, high, lowest, above, reaching, goal, top,
    MASS: tl.constexpr, CHUNK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The largest key, from `lowest` on, that a goal is reached at, what reaches it, and what reaches the next one."""
    reached, missed, beyond = lowest.to(tl.int64), _key(high).to(tl.int64), above
    while missed - reached > 1:
        pivots = _between(reached, missed, WAYS)
        reach = above + _sum(
            scores, ids, keys, amounts, listed, width, low, high, 0, pivots, top, MASS, False, CHUNK
        )  # fmt: skip
        enough = reach >= goal
        reached, missed = _narrow(reached, missed, pivots, enough)
        reaching = tl.minimum(reaching, tl.min(tl.where(enough, reach, reaching), 0))
        beyond = tl.maximum(beyond, tl.max(tl.where(enough, beyond, reach), 0))
    return reached, reaching, beyond


# Triton 3.6 fails on a loop that it knows to be dead, as the last one is if a constant says that a row has one score.
@triton.jit(do_not_specialize=["width", "rows"])
def _select(
    scores, tops, sums, counts, partial, found, ids, keys, amounts, bounds, edges, slots, numbers, settings,
    width, rows,
    COLUMNS: tl.constexpr, TOP_K: tl.constexpr, SETTINGS: tl.constexpr, TAIL: tl.constexpr, LEAST: tl.constexpr,
    PIVOTS: tl.constexpr, SPLITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr,
    CHUNK: tl.constexpr, WAYS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    k, own = tl.load(numbers + slot * COLUMNS + TOP_K), settings + slot * SETTINGS
    tail, least = tl.load(own + TAIL), tl.load(own + LEAST)
    top, reach = find_extent(tops, sums, counts, row, BLOCKS, BLOCKS_P)
    bound, edge = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int64)
    if (k > 0) | (tail > 0.0):
        low, high, above, reaching, goal = find_bracket(
            partial, row, rows, width, k, tail, top, reach, 2, PIVOTS, SPLITS
        )  # fmt: skip
        listed = tl.load(found + row)
        listed = tl.where(listed <= CAPACITY, listed, 0)
        scores += row.to(tl.int64) * width
        place = row.to(tl.int64) * CAPACITY
        ids += place
        keys += place
        amounts += place
        key, one = _key(low).to(tl.int64), tl.zeros([1], tl.int64)
        if k > 0:
            key, _, _ = _search(
                scores, ids, keys, amounts, listed, width, low, high, key, above, reaching, goal, top, False, CHUNK,
                WAYS,
            )  # fmt: skip
            if tail > 0.0:
                high, above = tl.full([], float("inf"), tl.float32), tl.full([], 0, tl.int64)
                reaching = tl.max(_sum(
                    scores, ids, keys, amounts, listed, width, low, high, 0, one + key, top, True, False, CHUNK
                ), 0)  # fmt: skip
                goal = find_goal(reaching, tail)
        if tail > 0.0:
            key, reaching, beyond = _search(
                scores, ids, keys, amounts, listed, width, low, high, key, above, reaching, goal, top, True, CHUNK,
                WAYS,
            )  # fmt: skip
            # Of the tokens with this very score, each of the same mass, those with the highest ids make up the goal.
            ties = tl.max(_sum(
                scores, ids, keys, amounts, listed, width, low, high, key, one, top, False, True, CHUNK
            ), 0)  # fmt: skip
            needed = tl.cdiv(goal - beyond, tl.maximum((reaching - beyond) // tl.maximum(ties, 1), 1))
            if needed < ties:
                missed = edge + width
                while missed - edge > 1:
                    pivots = _between(edge, missed, WAYS)
                    counted = _sum(
                        scores, ids, keys, amounts, listed, width, low, high, key, pivots, top, False, True, CHUNK
                    )  # fmt: skip
                    edge, missed = _narrow(edge, missed, pivots, counted >= needed)
        word = key.to(tl.int32)
        bound = (word ^ ((word >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    if top + least > bound:
        bound, edge = top + least, edge * 0
    tl.store(bounds + row, bound)
    tl.store(edges + row, edge)


def find_bounds(scores: Scores, state: RowState, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The bound of what each row keeps.

    Args:
        scores: of B rows.
        state: the settings of slots.
        slots: `[B]` int64.

    Returns:
        `[B]` float32 scores and `[B]` int32 token ids, as `liveroll.decode.truncation.find_bounds` has them.
    """
    (rows, width), device = scores.values.shape, slots.device
    blocks = triton.cdiv(width, BLOCK)
    partial = torch.empty(2, rows, _SPLITS, _PIVOTS, dtype=torch.int64, device=device)
    ids, keys = torch.empty(2, rows, min(_CAPACITY, width), dtype=torch.int32, device=device)
    amounts = torch.empty(ids.shape, dtype=torch.int64, device=device)
    bounds = torch.empty(rows, dtype=torch.float32, device=device)
    edges = torch.empty(rows, dtype=torch.int32, device=device)
    limits = {
        "COLUMNS": len(Column), "TOP_K": int(Column.TOP_K), "SETTINGS": len(Setting), "TAIL": int(Setting.TAIL),
        "PIVOTS": _PIVOTS, "SPLITS": _SPLITS, "BLOCKS": blocks, "BLOCKS_P": triton.next_power_of_2(blocks),
        "enable_fp_fusion": False,
    }  # fmt: skip
    known = scores.values, scores.tops, scores.sums, scores.counts, partial
    own = slots, state.numbers, state.settings, width, rows
    for number in range(2):
        sum_at_pivots[(rows, _SPLITS)](*known, *own, PASS=number, CHUNK=_CHUNK, num_warps=8, **limits)
    listed = scores.found, ids, keys, amounts
    _list[(rows, blocks)](*known, *listed, *own, BLOCK=BLOCK, CAPACITY=ids.shape[1], num_warps=8, **limits)
    _select[(rows,)](
        *known, *listed, bounds, edges, *own,
        LEAST=int(Setting.LEAST), CHUNK=2 * _CHUNK, WAYS=_WAYS, CAPACITY=ids.shape[1], num_warps=16, **limits,
    )  # fmt: skip
    return bounds, edges
