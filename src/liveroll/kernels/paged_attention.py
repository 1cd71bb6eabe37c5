"""Decode attention over pages: grouped queries, split over the keys of each row.

One program takes one row, one KV head and one split of the row's keys, with an online softmax (Milakov and
Gimelshein 2018, arXiv:1805.02867); splits are merged by their log-sum-exp (flash-decoding, Dao et al. 2023). A row's
keys are cut by its own length, so a short row beside a long one costs what it has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64
_LEAST_CHUNK = 128
_MOST_SPLITS = 32
# Programs enough to fill a GPU of 132 multiprocessors a few times over.
_PROGRAMS = 528

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    query, keys, values, table, lengths, sinks, output, partial, weight,
    scale, softcap, q_row, q_head, k_page, k_token, k_head, v_page, v_token, v_head, table_row,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, GROUP_P: tl.constexpr, K_DIM: tl.constexpr, K_DIM_P: tl.constexpr,
    V_DIM: tl.constexpr, V_DIM_P: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end = tl.load(lengths + row).to(tl.int32)
    start = tl.maximum(end - WINDOW, 0) if WINDOW > 0 else 0
    count = end - start
    chunk = tl.maximum(tl.cdiv(tl.cdiv(count, SPLITS), BLOCK) * BLOCK, LEAST)
    low = start + split * chunk
    if low >= end:
        return
    high = tl.minimum(low + chunk, end)

    g = tl.arange(0, GROUP_P)
    kd, vd, t = tl.arange(0, K_DIM_P), tl.arange(0, V_DIM_P), tl.arange(0, BLOCK)
    in_group, in_k, in_v = g < GROUP, kd < K_DIM, vd < V_DIM
    q = tl.load(
        query + row * q_row + (head * GROUP + g)[:, None] * q_head + kd[None, :],
        mask=in_group[:, None] & in_k[None, :], other=0.0,
    )  # fmt: skip
    top = tl.full([GROUP_P], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_P], tl.float32)
    if SINKS:
        # A sink is a key without a value; the first split has it.
        sink = tl.load(sinks + head * GROUP + g, mask=in_group, other=0.0).to(tl.float32) * _LOG2_E
        top = tl.where(split == 0, sink, top)
        total = tl.where(split == 0, 1.0, total)
    acc = tl.zeros([GROUP_P, V_DIM_P], tl.float32)
    for at in range(low, high, BLOCK):
        position = at + t
        inside = position < high
        page = tl.load(table + row * table_row + position // PAGE, mask=inside, other=0).to(tl.int64)
        offset = position % PAGE
        k = tl.load(
            keys + (page * k_page + offset * k_token + head * k_head)[:, None] + kd[None, :],
            mask=inside[:, None] & in_k[None, :], other=0.0,
        )  # fmt: skip
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
        score = tl.where(inside[None, :], score * _LOG2_E, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        decay = tl.exp2(top - higher)
        total = total * decay + tl.sum(p, 1)
        v = tl.load(
            values + (page * v_page + offset * v_token + head * v_head)[:, None] + vd[None, :],
            mask=inside[:, None] & in_v[None, :], other=0.0,
        )  # fmt: skip
        acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = higher

    result = acc / total[:, None]
    at_head = row * HEADS * GROUP + head * GROUP + g
    stored = in_group[:, None] & in_v[None, :]
    if count <= chunk:
        tl.store(output + at_head[:, None] * V_DIM + vd[None, :], result.to(output.dtype.element_ty), mask=stored)
    else:
        at_split = at_head * SPLITS + split
        tl.store(partial + at_split[:, None] * V_DIM + vd[None, :], result, mask=stored)
        tl.store(weight + at_split, top + tl.log2(total), mask=in_group)


@triton.jit
def _merge(
    lengths, output, partial, weight,
    WINDOW: tl.constexpr, V_DIM: tl.constexpr, V_DIM_P: tl.constexpr, QUERY_HEADS: tl.constexpr,
    BLOCK: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    end = tl.load(lengths + row).to(tl.int32)
    start = tl.maximum(end - WINDOW, 0) if WINDOW > 0 else 0
    count = end - start
    chunk = tl.maximum(tl.cdiv(tl.cdiv(count, SPLITS), BLOCK) * BLOCK, LEAST)
    if count <= chunk:
        return
    s, d = tl.arange(0, SPLITS), tl.arange(0, V_DIM_P)
    used = s * chunk < count
    at = (row * QUERY_HEADS + head) * SPLITS + s
    w = tl.load(weight + at, mask=used, other=float("-inf"))
    w = tl.exp2(w - tl.max(w, 0))
    part = tl.load(partial + at[:, None] * V_DIM + d[None, :], mask=used[:, None] & (d < V_DIM)[None, :], other=0.0)
    result = tl.sum(part * w[:, None], 0) / tl.sum(w, 0)
    tl.store(output + (row * QUERY_HEADS + head) * V_DIM + d, result.to(output.dtype.element_ty), mask=d < V_DIM)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    longest: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one new token a row over the row's pages.

    Args:
        query: `[B, query_heads, key_dim]` fp32, fp16 or bf16, the last dimension contiguous.
        keys: `[pages, page_size, kv_heads, key_dim]` of the same dtype.
        values: `[pages, page_size, kv_heads, value_dim]`.
        table: `[B, P]` int32 pages of each row.
        lengths: `[B]` int64 keys of each row, at least 1.
        longest: an upper bound of them; only the number of splits depends on it.
        scale: factor of the scores.
        window: keys that a token sees, itself included, or None for all.
        softcap: bound of the scores, or None.
        sinks: `[query_heads]` sink logits, or None.

    Returns:
        `[B, query_heads, value_dim]`.
    """
    rows, query_heads, key_dim = query.shape
    page_size, heads, value_dim = values.shape[1:]
    group = query_heads // heads
    reach = longest if window is None else min(longest, window)
    wanted = min(_PROGRAMS // (rows * heads), -(-reach // _LEAST_CHUNK), _MOST_SPLITS)
    splits = triton.next_power_of_2(max(wanted, 1))
    output = torch.empty(rows, query_heads, value_dim, dtype=query.dtype, device=query.device)
    partials = rows * query_heads * splits if splits > 1 else 0
    partial = torch.empty(partials * value_dim, dtype=torch.float32, device=query.device)
    weight = torch.empty(partials, dtype=torch.float32, device=query.device)
    shared = {"WINDOW": window or 0, "BLOCK": _BLOCK, "LEAST": _LEAST_CHUNK, "SPLITS": splits}
    # A matrix product sums over 16 elements at least.
    key_dim_p, value_dim_p = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    _attend[(rows, heads, splits)](
        query, keys, values, table, lengths, query if sinks is None else sinks, output, partial, weight,
        scale, softcap or 0.0, query.stride(0), query.stride(1), *keys.stride()[:3], *values.stride()[:3],
        table.stride(0), SOFTCAP=softcap is not None, SINKS=sinks is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        GROUP=group, GROUP_P=max(16, triton.next_power_of_2(group)),
        K_DIM=key_dim, K_DIM_P=key_dim_p, V_DIM=value_dim, V_DIM_P=value_dim_p,
        HEADS=heads, PAGE=page_size, num_warps=4, num_stages=3 if query.dtype != torch.float32 else 1, **shared,
    )  # fmt: skip
    if splits > 1:
        _merge[(rows, query_heads)](
            lengths, output, partial, weight, V_DIM=value_dim, V_DIM_P=value_dim_p, QUERY_HEADS=query_heads,
            num_warps=4, **shared,
        )  # fmt: skip
    return output
