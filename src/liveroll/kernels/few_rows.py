"""Products of few rows, which read their weights once: what decode steps spend most of their time on.

A tile of the weight is the left factor, so that tensor cores are filled by its rows however few are multiplied. Rows
are summed over in the same order whatever their number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

# As many rows as are read from the weights faster than cuBLAS does, on an H200.
FEW = 64
_TILE = 64
_STEP = 64
# Programs that a product is cut into at least, where its outputs are too few for all 132 multiprocessors of an H200.
_PROGRAMS = 128


@triton.jit(do_not_specialize=["rows"])
def _gated_few(
    input, weight, output, rows, outputs, inputs,
    ROWS_P: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row, step = tl.arange(0, ROWS_P), tl.arange(0, STEP)
    gate = tl.zeros([TILE, ROWS_P], tl.float32)
    up = tl.zeros([TILE, ROWS_P], tl.float32)
    for begin in tl.range(0, inputs, STEP, num_stages=STAGES):
        at = begin + step
        x = tl.load(
            input + row[None, :] * inputs + at[:, None], mask=(row < rows)[None, :] & (at < inputs)[:, None], other=0.0
        )
        inside = (column < outputs)[:, None] & (at < inputs)[None, :]
        w = tl.load(weight + column[:, None] * inputs + at[None, :], mask=inside, other=0.0)
        gate = tl.dot(w, x, gate, input_precision=PRECISION)
        w = tl.load(weight + (outputs + column)[:, None] * inputs + at[None, :], mask=inside, other=0.0)
        up = tl.dot(w, x, up, input_precision=PRECISION)
    dtype = output.dtype.element_ty
    result = _gate(gate.to(dtype), up.to(dtype))
    stored = (column < outputs)[:, None] & (row < rows)[None, :]
    tl.store(output + row[None, :] * outputs + column[:, None], result, mask=stored)


@triton.jit
def _gate(gate, up):
    """As a model does it: each result is rounded to the dtype."""
    wide = gate.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up


@triton.jit
def _gate_many(product, output, outputs, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(product + row * 2 * outputs + at, mask=at < outputs, other=0.0)
    up = tl.load(product + row * 2 * outputs + outputs + at, mask=at < outputs, other=0.0)
    tl.store(output + row * outputs + at, _gate(gate, up), mask=at < outputs)


@triton.jit(do_not_specialize=["rows"])
def _sum_few(
    input, weight, parts, rows, outputs, inputs,
    ROWS_P: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    part = tl.program_id(1)
    row, step = tl.arange(0, ROWS_P), tl.arange(0, STEP)
    share = tl.cdiv(tl.cdiv(inputs, STEP), PARTS) * STEP
    total = tl.zeros([TILE, ROWS_P], tl.float32)
    for begin in tl.range(part * share, tl.minimum((part + 1) * share, inputs), STEP, num_stages=STAGES):
        at = begin + step
        x = tl.load(
            input + row[None, :] * inputs + at[:, None], mask=(row < rows)[None, :] & (at < inputs)[:, None], other=0.0
        )
        w = tl.load(
            weight + column[:, None] * inputs + at[None, :],
            mask=(column < outputs)[:, None] & (at < inputs)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(w, x, total, input_precision=PRECISION)
    stored = (column < outputs)[:, None] & (row < rows)[None, :]
    tl.store(parts + (part * rows + row)[None, :] * outputs + column[:, None], total, mask=stored)


@triton.jit(do_not_specialize=["rows"])
def _add_and_norm(
    parts, residual, scale, added, normed, rows, width, epsilon, PARTS: tl.constexpr, WIDTH_P: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH_P)
    inside = at < width
    dtype = added.dtype.element_ty
    product = tl.load(parts + row * width + at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        product += tl.load(parts + (part * rows + row) * width + at, mask=inside, other=0.0)
    before = tl.load(residual + row * width + at, mask=inside, other=0.0)
    # As a model does it: each result is rounded to the dtype.
    sums = (before.to(tl.float32) + product.to(dtype).to(tl.float32)).to(dtype)
    tl.store(added + row * width + at, sums, mask=inside)
    wide = sums.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / width + epsilon)
    weights = tl.load(scale + at, mask=inside, other=0.0)
    tl.store(normed + row * width + at, weights * (wide * factor).to(dtype), mask=inside)


def gated_product(input: Tensor, weight: Tensor) -> Tensor:
    """`silu(x G) * (x U)` for the gate's weight G and that of the other projection, U.

    Args:
        input: `[M, K]`, of any float dtype, contiguous.
        weight: `[2 N, K]` of its dtype, contiguous: the rows of G, and those of U behind them.

    Returns:
        `[M, N]`.
    """
    (rows, inputs), outputs = input.shape, len(weight) // 2
    output = input.new_empty(rows, outputs)
    if rows > FEW:
        product = functional.linear(input, weight)
        _gate_many[(rows, triton.cdiv(outputs, 2048))](
            product, output, outputs, BLOCK=2048, num_warps=8, enable_fp_fusion=True
        )
        return output
    _gated_few[(triton.cdiv(outputs, _TILE),)](
        input, weight, output, rows, outputs, inputs, ROWS_P=_padded(rows), TILE=_TILE, STEP=_STEP, STAGES=4,
        PRECISION=_precision(input), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return output


def normed_product(
    input: Tensor, weight: Tensor, residual: Tensor, scale: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """`r + x W`, and the RMS norm of that.

    Args:
        input: `[M, K]`, of any float dtype, contiguous.
        weight: `[N, K]` of its dtype, contiguous.
        residual: `[M, N]` of its dtype, contiguous.
        scale: `[N]` of its dtype, the weights of the norm.
        epsilon: what the norm adds to the mean square.

    Returns:
        both `[M, N]`.
    """
    (rows, inputs), outputs = input.shape, len(weight)
    added, normed = input.new_empty(rows, outputs), input.new_empty(rows, outputs)
    tiles = triton.cdiv(outputs, _TILE)
    count = triton.cdiv(_PROGRAMS, tiles) if rows <= FEW else 1
    if rows > FEW:
        parts = functional.linear(input, weight)
    else:
        parts = torch.empty(count, rows, outputs, dtype=torch.float32, device=input.device)
        _sum_few[(tiles, count)](
            input, weight, parts, rows, outputs, inputs, ROWS_P=_padded(rows), TILE=_TILE, STEP=_STEP, STAGES=6,
            PARTS=count, PRECISION=_precision(input), num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    width = triton.next_power_of_2(outputs)
    _add_and_norm[(rows,)](
        parts, residual, scale, added, normed, rows, outputs, epsilon, PARTS=count, WIDTH_P=width,
        num_warps=min(max(width // 512, 1), 16), enable_fp_fusion=True,
    )  # fmt: skip
    return added, normed


def _padded(rows: int) -> int:
    # A matrix product takes 16 rows at least.
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def _precision(input: Tensor) -> str:
    return "ieee" if input.dtype == torch.float32 else "tf32"
