"""The part of decode attention that rows have in common: the pages of a prompt, read once for several of its samples.

A program takes one cluster of rows, one KV head and one split of the keys that these rows share at a time, for the
query heads of all the rows together (Juravsky et al. 2024, arXiv:2402.05099). `paged_attention` merges the results with
each row's own keys, and may start meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from liveroll.attention.layout import SharedPrefixes
from liveroll.kernels.early import starts_early
from liveroll.kernels.lanes import lanes_for
from liveroll.kernels.over_pages import attend_pages, chunk_of

# A split's results are as many bytes as 64 of its keys and values, and are written and read: there are no more splits
# than give each program a part of the work.
_LEAST_CHUNK, _CHUNK_STEP = tl.constexpr(256), tl.constexpr(128)
_MOST_SPLITS = 32
# Rows times splits, so that results for each of a model's heads take 4 MiB at most.
_MOST_PARTIAL = 8192
# Two for each multiprocessor of an H200, as many as its memory holds at a time. They share out what there is: a step's
# graph has room for far more clusters than most steps have, and a program that finds none takes its turn like any.
_PROGRAMS = 264
_PARTS = tl.constexpr(_PROGRAMS)
# Queries of half precision that one program takes: rows that one instruction of an H200's matrix units multiplies. Of
# more fp32 ones the registers would not hold the sums.
_MOST_HALF, _MOST_FULL = 64, 16
_MOST_ROWS = 16


@dataclass(frozen=True)
class PrefixPart:
    """Attention of rows to the keys that they share with others.

    Attributes:
        clusters: `[1]` int32, of how many clusters.
        shared: `[B]` int32, how many keys that is, the first ones of each row.
        partial: `[B, query_heads, splits, value_dim]` fp32, the result over each split of them.
        weight: `[B, query_heads, splits]` fp32, its log-sum-exp in base 2.
    """

    clusters: Tensor
    shared: Tensor
    partial: Tensor
    weight: Tensor


def rows_together(group: int, dtype: torch.dtype) -> int:
    """Rows whose shared keys are read once, where a KV head has `group` query heads; 1 if that is done for none."""
    queries = _MOST_HALF if dtype.itemsize == 2 else _MOST_FULL
    return max(min(queries // group, _MOST_ROWS), 1)


@triton.jit
def prefix_chunk_of(count, clusters, splits, HEADS: tl.constexpr):
    """Keys in each split but the last of `count` shared ones, of which there may be `splits`."""
    wanted = tl.cdiv(_PARTS, tl.maximum(clusters * HEADS, 1))
    return chunk_of(count, tl.minimum(wanted, splits), _CHUNK_STEP, _LEAST_CHUNK)


@triton.jit
def _attend_together(
    query, keys, values, table, clusters, members, tokens, partial, weight,
    scale, softcap, q_row, q_head, k_page, k_token, k_head, v_page, v_token, v_head, table_row, splits,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, QUERIES_P: tl.constexpr,
    K_DIM: tl.constexpr, K_DIM_P: tl.constexpr, V_DIM: tl.constexpr, V_DIM_P: tl.constexpr,
    HEADS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    there_are = tl.load(clusters)
    m, kd, vd = tl.arange(0, QUERIES_P), tl.arange(0, K_DIM_P), tl.arange(0, V_DIM_P)
    for part in range(tl.program_id(0), there_are * HEADS * splits, tl.num_programs(0)):
        head, cluster, split = part % HEADS, part // HEADS % there_are, part // HEADS // there_are
        count = tl.load(tokens + cluster)
        chunk = prefix_chunk_of(count, there_are, splits, HEADS)
        low = split * chunk
        if low < count:
            row = tl.load(members + cluster * ROWS + m // GROUP, mask=m < ROWS * GROUP, other=-1)
            there, query_head = row >= 0, head * GROUP + m % GROUP
            q = tl.load(
                query + (row * q_row + query_head * q_head)[:, None] + kd[None, :],
                mask=there[:, None] & (kd < K_DIM)[None, :], other=0.0,
            )  # fmt: skip
            top, total, acc = attend_pages(
                q, tl.full([QUERIES_P], -1e30, tl.float32), tl.zeros([QUERIES_P], tl.float32),
                tl.zeros([QUERIES_P, V_DIM_P], tl.float32), low, tl.minimum(low + chunk, count),
                table + tl.load(members + cluster * ROWS) * table_row, keys + head * k_head, values + head * v_head,
                scale, softcap, k_page, k_token, v_page, v_token,
                SOFTCAP, PRECISION, K_DIM, K_DIM_P, V_DIM, V_DIM_P, PAGE, BLOCK,
            )  # fmt: skip
            at = (row * HEADS * GROUP + query_head) * splits + split
            tl.store(
                partial + at[:, None] * V_DIM + vd[None, :], acc / total[:, None],
                mask=there[:, None] & (vd < V_DIM)[None, :],
            )  # fmt: skip
            tl.store(weight + at, top + tl.log2(total), mask=there)


def attend_prefixes(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    prefixes: SharedPrefixes,
    *,
    longest: int,
    scale: float,
    softcap: float | None,
) -> PrefixPart | None:
    """Attend from the rows of each cluster to the keys that they share.

    Args:
        query: `[B, query_heads, key_dim]` fp32, fp16 or bf16, the last dimension contiguous.
        keys: `[pages, page_size, kv_heads, key_dim]` of the query's dtype.
        values: `[pages, page_size, kv_heads, value_dim]`.
        table: `[B, P]` int32 pages of each row.
        prefixes: the clusters.
        longest: an upper bound of the keys; only the number of splits depends on it.
        scale: factor of the scores.
        softcap: bound of the scores, or None.

    Returns:
        None if there is no room for a cluster.
    """
    rows, query_heads, key_dim = query.shape
    page_size, heads, value_dim = values.shape[1:]
    clusters, together = prefixes.members.shape
    if not clusters:
        return None
    splits = max(min(-(-longest // _LEAST_CHUNK.value), _MOST_SPLITS, _MOST_PARTIAL // rows), 1)
    partial = torch.empty(rows, query_heads, splits, value_dim, dtype=torch.float32, device=query.device)
    weight = torch.empty(rows, query_heads, splits, dtype=torch.float32, device=query.device)
    group = query_heads // heads
    key_dim_p, value_dim_p = (lanes_for(dim, 16) for dim in (key_dim, value_dim))
    # More keys of larger heads would not fit into a multiprocessor's memory.
    if query.element_size() == 4:
        block, warps, stages = 64, 4, 1
    elif key_dim_p + value_dim_p <= 256:
        block, warps, stages = 64, 4, 3
    else:
        block, warps, stages = (32, 8, 2) if key_dim_p + value_dim_p <= 512 else (16, 8, 1)
    _attend_together[(min(clusters * heads * splits, _PROGRAMS),)](
        query, keys, values, table, prefixes.count, prefixes.members, prefixes.tokens, partial, weight,
        scale, softcap or 0.0, *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        table.stride(0), splits, SOFTCAP=softcap is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        ROWS=together, GROUP=group, QUERIES_P=lanes_for(together * group, 16),
        K_DIM=key_dim, K_DIM_P=key_dim_p, V_DIM=value_dim, V_DIM_P=value_dim_p,
        HEADS=heads, PAGE=page_size, BLOCK=block, EARLY=starts_early(query.device),
        num_warps=warps, num_stages=stages, enable_fp_fusion=True,
    )  # fmt: skip
    return PrefixPart(prefixes.count, prefixes.shared, partial, weight)
