"""Attention of a few queries to keys in pages, with an online softmax: what the kernels of decode attention do alike.

The softmax is that of Milakov and Gimelshein 2018 (arXiv:1805.02867). Its state is, for each query, the greatest score
so far, the sum of exponentials below it, and the sum of values that these weigh. Scores are in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def chunk_of(count, splits, BLOCK: tl.constexpr, LEAST: tl.constexpr):
    """Keys in each split but the last of `count`.

    It is a multiple of `BLOCK`, or `LEAST` where that is more, and so many that `splits` take them all.
    """
    return tl.maximum(tl.cdiv(tl.cdiv(count, splits), BLOCK) * BLOCK, LEAST)


@triton.jit
def score_of(product, scale, softcap, SOFTCAP: tl.constexpr):
    """The base-2 score of products of a query and a key."""
    score = product * scale
    if SOFTCAP:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
    return score * LOG2_E


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


@triton.jit
def merge(top, total, acc, weight, result):
    """The state after other keys, of which the softmax is known: their log-sum-exp in base 2, and their result."""
    higher = tl.maximum(top, weight)
    decay, more = tl.exp2(top - higher), tl.exp2(weight - higher)
    return higher, total * decay + more, acc * decay[:, None] + more[:, None] * result
