"""Decode attention over pages: grouped queries, split over the keys of each row.

One program takes one row, one KV head and one split of the row's keys; splits are merged by their log-sum-exp
(flash-decoding, Dao et al. 2023), by the program of the row that comes last. A row's keys are cut by its own length, so
a short row beside a long one costs what it has. The program of the last keys puts the new token into its page; that of
the first merges what `attend_prefixes` made of keys that the row shares with others. Where the GPU can, it starts while
that kernel ends, whose results it waits for last: before, it touches nothing of that kernel's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from liveroll.kernels.early import starts_early
from liveroll.kernels.lanes import lanes_for
from liveroll.kernels.over_pages import attend_pages, chunk_of
from liveroll.kernels.prefix_attention import PrefixPart, prefix_chunk_of
from liveroll.kernels.softmax import LOG2_E, merge, score_of

_LEAST_CHUNK = tl.constexpr(128)
_MOST_SPLITS = 32
# Programs enough to fill a GPU of 132 multiprocessors a few times over.
_PROGRAMS = 528
# Up to so many pairs of a row and a KV head, one program has a multiprocessor to itself and takes more keys at a time:
# 32 rows of 80 keys and 2 heads take 6.2 us in place of 6.9, 8 rows of 32,000 take 80 in place of 102; 64 rows of 500
# would take longer. Measured on an H200.
_FEW_PAIRS = 64
# From so many on, each program has one warp, so that many of them wait for their keys at a time: behind the shared keys
# of 64 prompts, 512 rows of 128 keys of their own and 2 heads take 38.3 us in place of 41.4. Measured on an H200.
_MANY_PAIRS = 1024


@triton.jit
def _attend(
    query, key, value, keys, values, table, lengths, index, sinks, clusters, shared, prefix, prefix_weight,
    output, partial, weight, arrived, scale, softcap, q_row, q_head, kn_row, kn_head, vn_row, vn_head,
    k_page, k_token, k_head, v_page, v_token, v_head, table_row, splits, prefix_splits,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PREFIX: tl.constexpr,
    PRECISION: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr, K_DIM: tl.constexpr, K_DIM_P: tl.constexpr,
    V_DIM: tl.constexpr, V_DIM_P: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS_P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end = tl.load(lengths + row).to(tl.int32)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(end - WINDOW, 0)
    if PREFIX:
        start, there_are = tl.load(shared + row), tl.load(clusters)
    count = end - start
    chunk = chunk_of(count, splits, BLOCK, _LEAST_CHUNK)
    low = start + split * chunk
    if low >= end:
        if EARLY:
            # This kernel must not end before the other one has.
            gdc_wait()
        return
    high = tl.minimum(low + chunk, end)
    has_new = high == end

    g, kd, vd = tl.arange(0, GROUP_P), tl.arange(0, K_DIM_P), tl.arange(0, V_DIM_P)
    in_group, in_k, in_v = g < GROUP, kd < K_DIM, vd < V_DIM
    q = tl.load(
        query + row * q_row + (head * GROUP + g)[:, None] * q_head + kd[None, :],
        mask=in_group[:, None] & in_k[None, :], other=0.0,
    )  # fmt: skip
    k_new = tl.load(key + row * kn_row + head * kn_head + kd, mask=in_k, other=0.0).to(keys.dtype.element_ty)
    v_new = tl.load(value + row * vn_row + head * vn_head + vd, mask=in_v, other=0.0).to(values.dtype.element_ty)
    top = tl.full([GROUP_P], -1e30, tl.float32)  # finite: the difference of two infinities is not a number
    total = tl.zeros([GROUP_P], tl.float32)
    acc = tl.zeros([GROUP_P, V_DIM_P], tl.float32)
    if SINKS:
        # A sink is a key without a value; the first split has it.
        sink = tl.load(sinks + head * GROUP + g, mask=g < tl.where(split == 0, GROUP, 0), other=float("-inf")).to(
            tl.float32
        )
        top = tl.maximum(top, sink * LOG2_E)
        total = tl.exp2(sink * LOG2_E - top)
    at_head = row * HEADS * GROUP + head * GROUP + g
    stored = in_group[:, None] & in_v[None, :]
    top, total, acc = attend_pages(
        q, top, total, acc, low, tl.minimum(high, end - 1), table + row * table_row,
        keys + head * k_head, values + head * v_head, scale, softcap, k_page, k_token, v_page, v_token,
        SOFTCAP, PRECISION, K_DIM, K_DIM_P, V_DIM, V_DIM_P, PAGE, BLOCK,
    )  # fmt: skip
    if EARLY:
        gdc_wait()
    if PREFIX:
        used = tl.where(split == 0, tl.cdiv(start, prefix_chunk_of(start, there_are, prefix_splits, HEADS)), 0)
        for some in range(0, used, 4):
            # Four at a time, so that they are not waited for one by one.
            for place in tl.static_range(4):
                there = g < tl.where(some + place < used, GROUP, 0)
                at = at_head * prefix_splits + some + place
                w = tl.load(prefix_weight + at, mask=there, other=-1e30)
                part = tl.load(
                    prefix + at[:, None] * V_DIM + vd[None, :], mask=there[:, None] & in_v[None, :], other=0.0
                )
                top, total, acc = merge(top, total, acc, w, part)

    # The new token comes from where the model put it, so nobody waits for its page to be written. It comes last: loads
    # of the others are not held up by its sums, nor by its stores.
    if has_new:
        score = score_of(tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1), scale, softcap, SOFTCAP)
        top, total, acc = merge(top, total, acc, score, v_new.to(tl.float32)[None, :])
        at = tl.load(index + row)
        page, offset = at // PAGE, at % PAGE
        tl.store(keys + page * k_page + offset * k_token + head * k_head + kd, k_new, mask=in_k)
        tl.store(values + page * v_page + offset * v_token + head * v_head + vd, v_new, mask=in_v)

    result = acc / total[:, None]
    to = output + at_head[:, None] * V_DIM + vd[None, :]
    if count <= chunk:
        tl.store(to, result.to(output.dtype.element_ty), mask=stored)
        return
    at_split = at_head * splits + split
    tl.store(partial + at_split[:, None] * V_DIM + vd[None, :], result, mask=stored)
    tl.store(weight + at_split, top + tl.log2(total), mask=in_group)
    tl.debug_barrier()
    used = tl.cdiv(count, chunk)
    if tl.atomic_add(arrived + row * HEADS + head, 1, sem="acq_rel") < used - 1:
        return
    tl.store(arrived + row * HEADS + head, 0)
    s = tl.arange(0, SPLITS_P)
    weights = tl.load(
        weight + (at_head * splits)[:, None] + s[None, :],
        mask=in_group[:, None] & (s < used)[None, :], other=float("-inf"), cache_modifier=".cg",
    )  # fmt: skip
    top = tl.where(in_group, tl.max(weights, 1), 0.0)
    total = tl.where(in_group, 0.0, 1.0)
    acc = tl.zeros([GROUP_P, V_DIM_P], tl.float32)
    # Both sums in the order of the splits: how a reduction would add them depends on how many there may be.
    for other in tl.static_range(SPLITS_P):
        at_split = at_head * splits + other
        there = in_group & (tl.full([GROUP_P], other, tl.int32) < used)
        w = tl.load(weight + at_split, mask=there, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial + at_split[:, None] * V_DIM + vd[None, :],
            mask=there[:, None] & in_v[None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        share = tl.exp2(w - top)
        total += share
        acc += part * share[:, None]
    tl.store(to, (acc / total[:, None]).to(output.dtype.element_ty), mask=stored)


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    index: Tensor,
    arrived: Tensor,
    *,
    longest: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    prefix: PrefixPart | None = None,
) -> Tensor:
    """Put one new token a row into the row's pages, and attend from it to all of them.

    Args:
        query: `[B, query_heads, key_dim]` fp32, fp16 or bf16, the last dimension contiguous.
        key: `[B, kv_heads, key_dim]` of the new tokens, likewise.
        value: `[B, kv_heads, value_dim]`, likewise.
        keys: `[pages, page_size, kv_heads, key_dim]` of the query's dtype.
        values: `[pages, page_size, kv_heads, value_dim]`.
        table: `[B, P]` int32 pages of each row.
        lengths: `[B]` int64 keys of each row, the new one included.
        index: `[B]` int64, page × page_size + offset of each new token.
        arrived: int32 zeros, at least B × kv_heads; zeros again afterwards.
        longest: an upper bound of the lengths; only the number of splits depends on it.
        scale: factor of the scores.
        window: keys that a token sees, itself included, or None for all.
        softcap: bound of the scores, or None.
        sinks: `[query_heads]` sink logits, or None.
        prefix: the part of keys that rows share, which are not read again; not together with a window.

    Returns:
        `[B, query_heads, value_dim]`.
    """
    rows, query_heads, key_dim = query.shape
    page_size, heads, value_dim = values.shape[1:]
    group = query_heads // heads
    reach = longest if window is None else min(longest, window)
    # As many as the longest row can use: up to there they are cut alike whatever the bound, so that a captured step,
    # which has a higher one, sums in the same order as an eager one.
    splits = max(min(_PROGRAMS // (rows * heads), -(-reach // _LEAST_CHUNK.value), _MOST_SPLITS), 1)
    output = torch.empty(rows, query_heads, value_dim, dtype=query.dtype, device=query.device)
    partials = rows * query_heads * splits if splits > 1 else 0
    partial = torch.empty(partials * value_dim, dtype=torch.float32, device=query.device)
    weight = torch.empty(partials, dtype=torch.float32, device=query.device)
    # A matrix product sums over 16 elements at least.
    key_dim_p, value_dim_p = (lanes_for(dim, 16) for dim in (key_dim, value_dim))
    pairs, small = rows * heads, query.element_size() == 2 and key_dim_p + value_dim_p <= 256
    if small and pairs <= _FEW_PAIRS:
        block, warps, stages = 128, 8, 2
    elif small and pairs >= _MANY_PAIRS:
        block, warps, stages = 32, 1, 3
    else:
        # More keys of larger heads would not fit into a multiprocessor's memory.
        block, warps, stages = (64, 4, 3) if key_dim_p + value_dim_p <= 512 else (32, 4, 2)
    # Behind any other kernel it has to wait for that one's end before it reads anything.
    early = prefix is not None and starts_early(query.device)
    _attend[(rows, heads, splits)](
        query, key, value, keys, values, table, lengths, index, query if sinks is None else sinks,
        *((lengths,) * 4 if prefix is None else (prefix.clusters, prefix.shared, prefix.partial, prefix.weight)),
        output, partial, weight, arrived, scale, softcap or 0.0,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        table.stride(0), splits, 1 if prefix is None else prefix.weight.shape[2],
        WINDOW=window or 0, SOFTCAP=softcap is not None, SINKS=sinks is not None, PREFIX=prefix is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        GROUP=group, GROUP_P=lanes_for(group, 16),
        K_DIM=key_dim, K_DIM_P=key_dim_p, V_DIM=value_dim, V_DIM_P=value_dim_p,
        HEADS=heads, PAGE=page_size, BLOCK=block,
        SPLITS_P=lanes_for(splits), EARLY=early, launch_pdl=early,
        num_warps=warps, num_stages=stages if query.dtype != torch.float32 else 1, enable_fp_fusion=True,
    )  # fmt: skip
    return output
