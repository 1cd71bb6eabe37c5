"""The bound of what top-k, top-p and min-p keep, found without sorting: `liveroll.decode.truncation` on a GPU.

The bound is the largest score t such that the tokens that score t or more reach a goal: k tokens, or the mass that
top-p asks for. Two passes over the vocabulary, spread over the whole device, add up what reaches each of a few pivots,
the second between the two pivots of the first between which the bound lies. The few tokens left between the pivots
that come out of that are listed, each with its score and its mass, and one program a row halves the interval, over the
list alone, most of it in registers, until one of its scores is left. Masses are whole numbers, so that the result does
not depend on the order in which anything is added; where pivots lie costs time and changes nothing.
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
# There are registers for so many tokens of the list; the others are read again at each halving.
_HELD = 8192
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
def _reach(values, amounts, inside, pivot):
    """What the values inside that reach a pivot amount to, the largest below it, and the least of those that reach."""
    reaches = inside & (values >= pivot)
    return (
        tl.sum(tl.where(reaches, amounts, 0).to(tl.int64), 0),
        tl.max(tl.where(inside & (values < pivot), values, -0x80000000), 0),
        tl.min(tl.where(reaches, values, 0x7FFFFFFF), 0),
    )


@triton.jit
def _measure(
    scores, ids, keys, amounts, own, weights, listed, width, low, high, key, pivot, top,
    MASS: tl.constexpr, TIES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Number or mass of the tokens between two scores that reach a key, and the keys of tokens on both sides of it.

    Of ties, the tokens of `key`, it is ids instead of keys. Looks at the list; at the whole row if `listed` is 0. `own`
    and `weights` are what is held of the list: keys, and masses or, for ties, ids.
    """
    inside = own == key if TIES else own < _key(high)
    reach, under, over = _reach(weights if TIES else own, weights if MASS else 1, inside, pivot)
    if listed > 0:
        for start in range(own.shape[0], listed, CHUNK):
            at = start + tl.arange(0, CHUNK)
            more = at < listed
            values = tl.load(keys + at, mask=more, other=0)
            if TIES:
                more = more & (values == key)
                values = tl.load(ids + at, mask=more, other=0)
            else:
                more = more & (values < _key(high))
            weight = tl.load(amounts + at, mask=more, other=0) if MASS else 1
            further, below, above = _reach(values, weight, more, pivot)
            reach, under, over = reach + further, tl.maximum(under, below), tl.minimum(over, above)
    else:
        for start in range(0, width, CHUNK):
            index = start + tl.arange(0, CHUNK)
            score = tl.load(scores + index, mask=index < width, other=float("nan"))
            more = (score == score) & (_key(score) == key) if TIES else (score >= low) & (score < high)
            weight = mass(score, top) if MASS else 1
            further, below, above = _reach(index if TIES else _key(score), weight, more, pivot)
            reach, under, over = reach + further, tl.maximum(under, below), tl.minimum(over, above)
    return reach, under, over


@triton.jit
def _search(
    scores, ids, keys, amounts, own, weights, listed, width, low, high, key, reached, missed, above, reaching, goal,
    top, MASS: tl.constexpr, TIES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest key, or id of ties, that a goal is reached at, what reaches it, and what reaches the next one.

    It is from `reached` on and below `missed`, which come nearer until one value is left; `above` is what reaches all.
    """
    beyond = above
    while missed - reached > 1:
        pivot = (reached + missed) >> 1
        reach, under, over = _measure(
            scores, ids, keys, amounts, own, weights, listed, width, low, high, key, pivot, top, MASS, TIES, CHUNK
        )  # fmt: skip
        reach += above
        enough = reach >= goal
        reached, reaching = tl.where(enough, over, reached), tl.where(enough, reach, reaching)
        missed, beyond = tl.where(enough, missed, under.to(tl.int64) + 1), tl.where(enough, beyond, reach)
    return reached, reaching, beyond


# Triton 3.6 fails on a loop that it knows to be dead, as the last one is if a constant says that a row has one score.
@triton.jit(do_not_specialize=["width", "rows"])
def _select(
    scores, tops, sums, counts, partial, found, ids, keys, amounts, bounds, edges, slots, numbers, settings,
    width, rows,
    COLUMNS: tl.constexpr, TOP_K: tl.constexpr, SETTINGS: tl.constexpr, TAIL: tl.constexpr, LEAST: tl.constexpr,
    PIVOTS: tl.constexpr, SPLITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr,
    CHUNK: tl.constexpr, HELD: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    k, limits = tl.load(numbers + slot * COLUMNS + TOP_K), settings + slot * SETTINGS
    tail, least = tl.load(limits + TAIL), tl.load(limits + LEAST)
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
        at = tl.arange(0, HELD)
        own = tl.load(keys + at, mask=at < listed, other=-0x80000000)
        weights = tl.load(amounts + at, mask=at < tl.where(tail > 0.0, listed, 0), other=0)
        key, missed = _key(low).to(tl.int64), _key(high).to(tl.int64)
        if k > 0:
            key = _search(
                scores, ids, keys, amounts, own, weights, listed, width, low, high, 0, key, missed, above, reaching,
                goal, top, False, False, CHUNK,
            )[0]  # fmt: skip
            if tail > 0.0:
                high, above = tl.full([], float("inf"), tl.float32), tl.full([], 0, tl.int64)
                missed = _key(high).to(tl.int64)
                reaching = _measure(
                    scores, ids, keys, amounts, own, weights, listed, width, low, high, 0, key, top,
                    True, False, CHUNK,
                )[0]  # fmt: skip
                goal = find_goal(reaching, tail)
        if tail > 0.0:
            key, reaching, beyond = _search(
                scores, ids, keys, amounts, own, weights, listed, width, low, high, 0, key, missed, above, reaching,
                goal, top, True, False, CHUNK,
            )  # fmt: skip
            # Of the tokens with this very score, each of the same mass, those with the highest ids make up the goal.
            names = tl.load(ids + at, mask=at < listed, other=0)
            ties = _measure(
                scores, ids, keys, amounts, own, names, listed, width, low, high, key, edge, top, False, True, CHUNK
            )[0]  # fmt: skip
            needed = tl.cdiv(goal - beyond, tl.maximum((reaching - beyond) // tl.maximum(ties, 1), 1))
            if needed < ties:
                edge = _search(
                    scores, ids, keys, amounts, own, names, listed, width, low, high, key, edge, edge + width,
                    edge, ties, needed, top, False, True, CHUNK,
                )[0]  # fmt: skip
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
        LEAST=int(Setting.LEAST), CHUNK=2 * _CHUNK, HELD=min(_HELD, triton.next_power_of_2(ids.shape[1])),
        CAPACITY=ids.shape[1], num_warps=16, **limits,
    )  # fmt: skip
    return bounds, edges
