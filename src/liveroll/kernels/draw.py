"""One draw a row over the whole vocabulary: temperature, Gumbel noise, argmax and log-probability in one pass.

The noise is that of `liveroll.decode.noise`, bit for bit before the logarithms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _mix(word):
    word ^= word >> 16
    word *= 0x85EBCA6B
    word ^= word >> 13
    word *= 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def _draw_block(
    logits, temperature, sampled, stream, position, best, token, chosen, top, total, row_stride, vocab,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocab
    score = tl.load(logits + row.to(tl.int64) * row_stride + index, mask=inside, other=float("-inf")).to(tl.float32)
    score = score / tl.load(temperature + row)
    noisy = score
    if tl.load(sampled + row) != 0:
        low = tl.load(stream + 2 * row).to(tl.uint32)
        high = tl.load(stream + 2 * row + 1).to(tl.uint32)
        key = _mix(low ^ (tl.load(position + row).to(tl.uint32) * 0x9E3779B9))
        key = _mix(key ^ high)
        word = _mix(_mix((index.to(tl.uint32) * 0x9E3779B9) ^ key) ^ low)
        uniform = ((word & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
        uniform = tl.minimum(uniform, 0.99999994)
        # log1p(-u): for small u the first terms of its series are exact to float32, and 1 - u would lose its digits.
        exact = -tl.log(1.0 - uniform)
        series = uniform * (1.0 + uniform * (0.5 + uniform * (0.3333333333333333 + uniform * 0.25)))
        noisy = score - tl.log(tl.where(uniform < 0.01, series, exact))
    noisy = tl.where(inside, noisy, float("-inf"))
    highest, where = tl.max(noisy, 0, return_indices=True)
    largest = tl.max(score, 0)
    at = row * BLOCKS + block
    tl.store(best + at, highest)
    tl.store(token + at, block * BLOCK + where)
    tl.store(chosen + at, tl.sum(tl.where(tl.arange(0, BLOCK) == where, score, 0.0), 0))
    tl.store(top + at, largest)
    # A block in which every token is excluded has no sum.
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(total + at, tl.sum(tl.exp(score - finite), 0))


@triton.jit
def _draw_row(best, token, chosen, top, total, tokens, logprobs, BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr):
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS_P)
    inside = block < BLOCKS
    at = row * BLOCKS + block
    _, winner = tl.max(tl.load(best + at, mask=inside, other=float("-inf")), 0, return_indices=True)
    largest = tl.load(top + at, mask=inside, other=float("-inf"))
    highest = tl.max(largest, 0)
    summed = tl.sum(tl.load(total + at, mask=inside, other=0.0) * tl.exp(largest - highest), 0)
    tl.store(tokens + row, tl.load(token + row * BLOCKS + winner).to(tl.int64))
    tl.store(logprobs + row, tl.load(chosen + row * BLOCKS + winner) - highest - tl.log(summed))


def draw(
    logits: Tensor, temperature: Tensor, sampled: Tensor, stream: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one token a row.

    Args:
        logits: `[B, V]` of any float dtype, the last dimension contiguous.
        temperature: `[B]` float32.
        sampled: `[B]` bool, False takes the most likely token.
        stream: `[B, 2]` int64 keys of the random streams.
        position: `[B]` int64, position of the token to be sampled.

    Returns:
        `[B]` int64 tokens and `[B]` float32 log-probabilities in the distribution they were drawn from.
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    device = logits.device
    best, chosen, top, total = torch.empty(4, rows, blocks, dtype=torch.float32, device=device)
    token = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    _draw_block[(rows, blocks)](
        logits, temperature.contiguous(), sampled.to(torch.int8), stream.contiguous(), position.contiguous(),
        best, token, chosen, top, total, logits.stride(0), vocab, BLOCKS=blocks, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    _draw_row[(rows,)](
        best, token, chosen, top, total, tokens, logprobs,
        BLOCKS=blocks, BLOCKS_P=triton.next_power_of_2(blocks), num_warps=1,
    )  # fmt: skip
    return tokens, logprobs
