"""The bound of what top-k, top-p and min-p keep, found without sorting: `liveroll.decode.truncation` on a GPU.

The bound is the largest score t such that the tokens that score t or more reach a goal: k tokens, or the mass that
top-p asks for. Two passes over the vocabulary, spread over the whole device, add up what reaches each of a few pivots,
the second between the two pivots of the first between which the bound lies. The few tokens left between the pivots
that come out of that are listed, each with its score and its mass, and one program a row halves the interval, over the
list alone, until one score is left. Masses are whole numbers, so that the result does not depend on the order in which
anything is added; where pivots lie costs time and changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from liveroll.decode.state import Column, RowState, Setting
from liveroll.decode.truncation import FAR, POWERS, SERIES
from liveroll.kernels.scores import BLOCK, Scores

_PIVOTS = 8
_SPLITS = 16
_CHUNK = 1024
# Where more tokens lie between the last pivots, as it is with many equal ones, the whole row is searched.
_CAPACITY = 16384

_FAR = tl.constexpr(FAR)
_POWERS = tl.constexpr(POWERS)
_SERIES = [tl.constexpr(term) for term in SERIES]
_TERM_0, _TERM_1, _TERM_2, _TERM_3, _TERM_4, _TERM_5, _TERM_6 = _SERIES


@triton.jit
def mass(score, top):
    """`liveroll.decode.truncation.masses` of a block, to the last bit."""
    distance = top - score
    power = (tl.where(distance < _FAR, distance, _FAR) * _POWERS).to(tl.int32)
    fraction = ((power & 0xFFFFFF) << 8).to(tl.uint32)
    mass = tl.full(fraction.shape, _TERM_6, tl.uint32)
    mass = _TERM_5 - tl.umulhi(mass, fraction)
    mass = _TERM_4 - tl.umulhi(mass, fraction)
    mass = _TERM_3 - tl.umulhi(mass, fraction)
    mass = _TERM_2 - tl.umulhi(mass, fraction)
    mass = _TERM_1 - tl.umulhi(mass, fraction)
    mass = _TERM_0 - tl.umulhi(mass, fraction)
    return (mass.to(tl.int64) << 9) >> tl.minimum(power >> 24, 63).to(tl.int64)


@triton.jit
def _key(score):
    """A whole number that orders as the scores do."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _goal(mass, tail):
    """The mass that top-p asks for."""
    return tl.maximum(mass - (tail.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _extent(tops, sums, counts, row, BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr):
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
def _bracket(
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
            goal = tl.where(k > 0, goal, _goal(tl.sum(tl.where(pivot == 0, sums, 0), 0), tail))
        reached = sums >= goal
        low = tl.maximum(low, tl.max(tl.where(reached, scores, float("-inf")), 0))
        high = tl.minimum(high, tl.min(tl.where(reached, float("inf"), scores), 0))
        above = tl.maximum(above, tl.max(tl.where(reached, 0, sums), 0))
        reaching = tl.minimum(reaching, tl.min(tl.where(reached, sums, 0x7FFFFFFFFFFFFFFF), 0))
    return low, high, above, reaching, goal


@triton.jit(do_not_specialize=["rows"])
def _count(
    scores, tops, sums, counts, partial, slots, numbers, settings, width, rows,
    PASS: tl.constexpr, COLUMNS: tl.constexpr, TOP_K: tl.constexpr, SETTINGS: tl.constexpr, TAIL: tl.constexpr,
    PIVOTS: tl.constexpr, SPLITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    k, tail = tl.load(numbers + slot * COLUMNS + TOP_K), tl.load(settings + slot * SETTINGS + TAIL)
    if (k > 0) | (tail > 0.0):
        top, reach = _extent(tops, sums, counts, row, BLOCKS, BLOCKS_P)
        low, high, _, _, _ = _bracket(partial, row, rows, width, k, tail, top, reach, PASS, PIVOTS, SPLITS)
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
        top, reach = _extent(tops, sums, counts, row, BLOCKS, BLOCKS_P)
        low, high, _, _, _ = _bracket(partial, row, rows, width, k, tail, top, reach, 2, PIVOTS, SPLITS)
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
    scores, ids, keys, amounts, listed, width, low, high, key, edge, top, MASS: tl.constexpr, TIES: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Number or mass of the tokens between two scores that have at least some key; of ties, of those that have it.

    Of ties only ids from `edge` on count. Looks at the list; at the whole row if `listed` is 0.
    """
    total = tl.zeros([CHUNK], tl.int64)
    if listed > 0:
        for start in range(0, listed, CHUNK):
            at = start + tl.arange(0, CHUNK)
            inside = at < listed
            own = tl.load(keys + at, mask=inside, other=0)
            chosen = inside & (own >= key) & (own < _key(high))
            if TIES:
                chosen = inside & (own == key) & (tl.load(ids + at, mask=inside, other=0) >= edge)
            if MASS:
                total += tl.load(amounts + at, mask=chosen, other=0)
            else:
                total += chosen.to(tl.int64)
    else:
        for start in range(0, width, CHUNK):
            index = start + tl.arange(0, CHUNK)
            score = tl.load(scores + index, mask=index < width, other=float("nan"))
            own = _key(score)
            chosen = (score >= low) & (score < high) & (own >= key)
            if TIES:
                chosen = (score == score) & (own == key) & (index >= edge)
            if MASS:
                total += tl.where(chosen, mass(score, top), 0)
            else:
                total += chosen.to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def _search(
    scores, ids, keys, amounts, listed, width, low, high, lowest, above, reaching, goal, top,
    MASS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest key, from `lowest` on, that a goal is reached at, what reaches it, and what reaches the next one."""
    reached, missed, beyond = lowest.to(tl.int64), _key(high).to(tl.int64), above
    while missed - reached > 1:
        middle = (reached + missed) >> 1
        reach = above + _sum(
            scores, ids, keys, amounts, listed, width, low, high, middle, 0, top, MASS, False, CHUNK
        )  # fmt: skip
        enough = reach >= goal
        reached, reaching = tl.where(enough, middle, reached), tl.where(enough, reach, reaching)
        missed, beyond = tl.where(enough, missed, middle), tl.where(enough, beyond, reach)
    return reached, reaching, beyond


# Triton 3.6 fails on a loop that it knows to be dead, as the last one is if a constant says that a row has one score.
@triton.jit(do_not_specialize=["width", "rows"])
def _select(
    scores, tops, sums, counts, partial, found, ids, keys, amounts, bounds, edges, slots, numbers, settings,
    width, rows,
    COLUMNS: tl.constexpr, TOP_K: tl.constexpr, SETTINGS: tl.constexpr, TAIL: tl.constexpr, LEAST: tl.constexpr,
    PIVOTS: tl.constexpr, SPLITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr,
    CHUNK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    k, own = tl.load(numbers + slot * COLUMNS + TOP_K), settings + slot * SETTINGS
    tail, least = tl.load(own + TAIL), tl.load(own + LEAST)
    top, reach = _extent(tops, sums, counts, row, BLOCKS, BLOCKS_P)
    bound, edge = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int64)
    if (k > 0) | (tail > 0.0):
        low, high, above, reaching, goal = _bracket(
            partial, row, rows, width, k, tail, top, reach, 2, PIVOTS, SPLITS
        )  # fmt: skip
        listed = tl.load(found + row)
        listed = tl.where(listed <= CAPACITY, listed, 0)
        scores += row.to(tl.int64) * width
        place = row.to(tl.int64) * CAPACITY
        ids += place
        keys += place
        amounts += place
        key = _key(low).to(tl.int64)
        if k > 0:
            key, _, _ = _search(
                scores, ids, keys, amounts, listed, width, low, high, key, above, reaching, goal, top, False, CHUNK
            )  # fmt: skip
            if tail > 0.0:
                high, above = tl.full([], float("inf"), tl.float32), tl.full([], 0, tl.int64)
                reaching = _sum(
                    scores, ids, keys, amounts, listed, width, low, high, key, 0, top, True, False, CHUNK
                )  # fmt: skip
                goal = _goal(reaching, tail)
        if tail > 0.0:
            key, reaching, beyond = _search(
                scores, ids, keys, amounts, listed, width, low, high, key, above, reaching, goal, top, True, CHUNK
            )  # fmt: skip
            # Of the tokens with this very score, each of the same mass, those with the highest ids make up the goal.
            ties = _sum(scores, ids, keys, amounts, listed, width, low, high, key, 0, top, False, True, CHUNK)
            needed = tl.cdiv(goal - beyond, tl.maximum((reaching - beyond) // tl.maximum(ties, 1), 1))
            if needed < ties:
                missed = edge + width
                while missed - edge > 1:
                    middle = (edge + missed) >> 1
                    enough = needed <= _sum(
                        scores, ids, keys, amounts, listed, width, low, high, key, middle, top, False, True, CHUNK
                    )  # fmt: skip
                    edge, missed = tl.where(enough, middle, edge), tl.where(enough, missed, middle)
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
        _count[(rows, _SPLITS)](*known, *own, PASS=number, CHUNK=_CHUNK, num_warps=8, **limits)
    listed = scores.found, ids, keys, amounts
    _list[(rows, blocks)](*known, *listed, *own, BLOCK=BLOCK, CAPACITY=ids.shape[1], num_warps=8, **limits)
    _select[(rows,)](
        *known, *listed, bounds, edges, *own,
        LEAST=int(Setting.LEAST), CHUNK=2 * _CHUNK, CAPACITY=ids.shape[1], num_warps=16, **limits,
    )  # fmt: skip
    return bounds, edges
