"""Gumbel noise in kernels: that of `liveroll.decode.noise`, bit for bit before the logarithms."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(word):
    word ^= word >> 16
    word *= 0x85EBCA6B
    word ^= word >> 13
    word *= 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def _log2(x, DEVICE: tl.constexpr):
    """The logarithm to base 2; on a GPU by its own instruction, with an error of 2^-22 (PTX ISA, lg2.approx)."""
    if DEVICE:
        result = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = tl.log2(x)
    return result


@triton.jit
def exp2(x, DEVICE: tl.constexpr):
    """2^x; on a GPU by its own instruction, with a relative error of 2^-22, 0 below 2^-126 (PTX ISA, ex2.approx)."""
    if DEVICE:
        result = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = tl.exp2(x)
    return result


@triton.jit
def add_noise(
    score, slots, numbers, row, index,
    COLUMNS: tl.constexpr, POSITION: tl.constexpr, SAMPLED: tl.constexpr, STREAM_LOW: tl.constexpr,
    STREAM_HIGH: tl.constexpr, DEVICE: tl.constexpr,
):  # fmt: skip
    """Scores with the Gumbel noise of their tokens, or as they are where the row is greedy."""
    own = numbers + tl.load(slots + row) * COLUMNS
    noisy = score
    if tl.load(own + SAMPLED) != 0:
        low, high = tl.load(own + STREAM_LOW).to(tl.uint32), tl.load(own + STREAM_HIGH).to(tl.uint32)
        key = _mix(low ^ ((tl.load(own + POSITION) + 1).to(tl.uint32) * 0x9E3779B9))
        key = _mix(key ^ high)
        word = _mix(_mix((index.to(tl.uint32) * 0x9E3779B9) ^ key) ^ low)
        # (word + 1/2) / 2^31
        uniform = tl.fma((word & 0x7FFFFFFF).to(tl.int32).to(tl.float32), 4.656612873077393e-10, 2.3283064365386963e-10)
        uniform = tl.minimum(uniform, 0.99999994)
        # log1p(-u): for small u the first terms of its series are exact to float32, and 1 - u would lose its digits.
        exact = -0.6931471805599453 * _log2(1.0 - uniform, DEVICE)
        series = tl.fma(uniform, tl.fma(uniform, tl.fma(uniform, 0.25, 0.3333333333333333), 0.5), 1.0) * uniform
        noisy = tl.fma(_log2(tl.where(uniform < 0.01, series, exact), DEVICE), -0.6931471805599453, score)
    return noisy
