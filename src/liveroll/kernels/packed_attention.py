"""Prefill attention over packed sequences: grouped queries, causal within each sequence.

One program takes a block of queries and one head, with an online softmax over blocks of keys (FlashAttention-2, Dao
2023, arXiv:2307.08691). Sequences lie one behind the other, so a token sees the keys from the beginning of its sequence
up to itself: all that is read of where sequences begin is the position of each token in its own. A block of queries may
span several short sequences; it starts at the first key that any of its queries sees.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from liveroll.kernels.lanes import lanes_for
from liveroll.kernels.softmax import LOG2_E, score_of


@triton.jit
def _attend(
    query, key, value, column, sinks, output, tokens, scale, softcap,
    q_token, q_head, k_token, k_head, v_token, v_head,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, K_DIM_P: tl.constexpr,
    V_DIM: tl.constexpr, V_DIM_P: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # The last queries of a long sequence have the most keys: they go first, so that none of them is left for the end.
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    kv_head = head // GROUP
    i, j = tl.arange(0, QUERIES), tl.arange(0, KEYS)
    kd, vd = tl.arange(0, K_DIM_P), tl.arange(0, V_DIM_P)
    in_k, in_v = kd < K_DIM, vd < V_DIM
    token = block * QUERIES + i
    there = token < tokens
    first = token - tl.load(column + token, mask=there, other=0).to(tl.int32)
    if WINDOW > 0:
        first = tl.maximum(first, token - WINDOW + 1)
    q = tl.load(
        query + token.to(tl.int64)[:, None] * q_token + head * q_head + kd[None, :],
        mask=there[:, None] & in_k[None, :], other=0.0,
    )  # fmt: skip

    if SINKS:
        # A sink is a key without a value.
        top = tl.zeros([QUERIES], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = tl.full([QUERIES], 1.0, tl.float32)
    else:
        # Finite where there is no key yet: the difference of two infinities is not a number.
        top = tl.full([QUERIES], -1e30, tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, V_DIM_P], tl.float32)
    low = tl.min(first) // KEYS * KEYS
    high = tl.minimum(block * QUERIES + QUERIES, tokens)
    for begin in range(low, high, KEYS):
        other = begin + j
        inside = other < high
        at = other.to(tl.int64)
        k = tl.load(
            key + at[:, None] * k_token + kv_head * k_head + kd[None, :],
            mask=inside[:, None] & in_k[None, :], other=0.0,
        )  # fmt: skip
        score = score_of(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, softcap, SOFTCAP)
        seen = (other[None, :] >= first[:, None]) & (other[None, :] <= token[:, None])
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        decay = tl.exp2(top - higher)
        total = total * decay + tl.sum(p, 1)
        v = tl.load(
            value + at[:, None] * v_token + kv_head * v_head + vd[None, :],
            mask=inside[:, None] & in_v[None, :], other=0.0,
        )  # fmt: skip
        acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = higher

    result = acc / tl.where(there, total, 1.0)[:, None]
    to = output + (token.to(tl.int64) * HEADS + head)[:, None] * V_DIM + vd[None, :]
    tl.store(to, result.to(output.dtype.element_ty), mask=there[:, None] & in_v[None, :])


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    column: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention within each of several packed sequences. The host needs to know none of their lengths.

    Args:
        query: `[T, query_heads, key_dim]` fp32, fp16 or bf16, the last dimension contiguous.
        key: `[T, kv_heads, key_dim]`, likewise.
        value: `[T, kv_heads, value_dim]`, likewise.
        column: `[T]` int64, the position of each token in its sequence.
        scale: factor of the scores.
        window: keys that a token sees, itself included, or None for all.
        softcap: bound of the scores, or None.
        sinks: `[query_heads]` sink logits, or None.

    Returns:
        `[T, query_heads, value_dim]`.
    """
    tokens, heads, key_dim = query.shape
    kv_heads, value_dim = value.shape[1:]
    output = torch.empty(tokens, heads, value_dim, dtype=query.dtype, device=query.device)
    # A matrix product sums over 16 elements at least.
    key_dim_p, value_dim_p = (lanes_for(dim, 16) for dim in (key_dim, value_dim))
    wide, half = max(key_dim_p, value_dim_p) > 128, query.dtype != torch.float32
    queries, keys = (64, 32 if wide else 64) if half else (16 if wide else 32, 32)
    # More of larger heads would not fit into the memory of a multiprocessor of most GPUs.
    if max(key_dim_p, value_dim_p) > 256:
        queries, keys = 32 if half else 16, 16
    _attend[(triton.cdiv(tokens, queries), heads)](
        query, key, value, column, query if sinks is None else sinks, output, tokens, scale, softcap or 0.0,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        WINDOW=window or 0, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        PRECISION="tf32" if half else "ieee",
        HEADS=heads, GROUP=heads // kv_heads, K_DIM=key_dim, K_DIM_P=key_dim_p, V_DIM=value_dim, V_DIM_P=value_dim_p,
        QUERIES=queries, KEYS=keys, num_warps=4, num_stages=2 if half else 1, enable_fp_fusion=True,
    )  # fmt: skip
    return output
