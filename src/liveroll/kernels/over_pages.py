"""Attention of a few queries to keys in pages: what the kernels of decode attention do alike."""

from __future__ import annotations

import triton
import triton.language as tl

from liveroll.kernels.softmax import score_of


@triton.jit
def chunk_of(count, splits, BLOCK: tl.constexpr, LEAST: tl.constexpr):
    """Keys in each split but the last of `count`.

    It is a multiple of `BLOCK`, or `LEAST` where that is more, and so many that `splits` take them all.
    """
    return tl.maximum(tl.cdiv(tl.cdiv(count, splits), BLOCK) * BLOCK, LEAST)


@triton.jit
def attend_pages(
    q, top, total, acc, low, high, pages, keys, values, scale, softcap, k_page, k_token, v_page, v_token,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, K_DIM: tl.constexpr, K_DIM_P: tl.constexpr,
    V_DIM: tl.constexpr, V_DIM_P: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The state after the keys at positions from `low` to below `high`.

    `q` is `[queries, K_DIM_P]`; `pages` points to the pages by position, `keys` and `values` to one head of all pages.
    """
    kd, vd, t = tl.arange(0, K_DIM_P), tl.arange(0, V_DIM_P), tl.arange(0, BLOCK)
    in_k, in_v = kd < K_DIM, vd < V_DIM
    for begin in range(low, high, BLOCK):
        position = begin + t
        inside = position < high
        page = tl.load(pages + position // PAGE, mask=inside, other=0).to(tl.int64)
        offset = position % PAGE
        k = tl.load(
            keys + (page * k_page + offset * k_token)[:, None] + kd[None, :],
            mask=inside[:, None] & in_k[None, :], other=0.0,
        )  # fmt: skip
        score = score_of(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, softcap, SOFTCAP)
        score = tl.where(inside[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        decay = tl.exp2(top - higher)
        total = total * decay + tl.sum(p, 1)
        v = tl.load(
            values + (page * v_page + offset * v_token)[:, None] + vd[None, :],
            mask=inside[:, None] & in_v[None, :], other=0.0,
        )  # fmt: skip
        acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = higher
    return top, total, acc
