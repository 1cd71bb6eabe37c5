"""The online softmax of the attention kernels (Milakov and Gimelshein 2018, arXiv:1805.02867), with scores in base 2.

Its state is, for each query, the greatest score so far, the sum of exponentials below it, and the sum of values that
these weigh.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def score_of(product, scale, softcap, SOFTCAP: tl.constexpr):
    """The base-2 score of products of a query and a key."""
    score = product * scale
    if SOFTCAP:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
    return score * LOG2_E


@triton.jit
def merge(top, total, acc, weight, result):
    """The state after other keys, of which the softmax is known: their log-sum-exp in base 2, and their result."""
    higher = tl.maximum(top, weight)
    decay, more = tl.exp2(top - higher), tl.exp2(weight - higher)
    return higher, total * decay + more, acc * decay[:, None] + more[:, None] * result
