"""Random numbers that depend on a request and a position alone.

Each is a hash of (stream, position, token), so neither the batch, the slot, the route nor the device matters.
The mixer is the 32-bit finaliser of MurmurHash3 (A. Appleby, public domain), applied to each word of the key.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B9
_FIRST = 0x85EBCA6B
_SECOND = 0xC2B2AE35


def _signed(word: int) -> int:
    """The int32 with the bits of an unsigned word: torch multiplies int32 modulo 2^32."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _mix(word: Tensor) -> Tensor:
    """MurmurHash3's finaliser of int32 words."""
    word = word ^ ((word >> 16) & 0xFFFF)
    word = word * _signed(_FIRST)
    word = word ^ ((word >> 13) & 0x7FFFF)
    word = word * _signed(_SECOND)
    return word ^ ((word >> 16) & 0xFFFF)


def gumbel_noise(stream: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel variables: the largest of `logits + noise` is a sample of `softmax(logits)`.

    Args:
        stream: `[B, 2]` int64, two 32-bit keys of each row's random stream.
        position: `[B]` int64, position of the token to be sampled.
        vocab_size: V.

    Returns:
        `[B, V]` float32.
    """
    low, high = stream.to(torch.int32).unbind(1)
    row = _mix(low ^ (position.to(torch.int32) * _signed(_GOLDEN)))
    row = _mix(row ^ high)
    token = torch.arange(vocab_size, dtype=torch.int32, device=stream.device) * _signed(_GOLDEN)
    word = _mix(_mix(token ^ row[:, None]) ^ low[:, None])
    # 31 bits: small uniforms stay distinct in float32, and they make the large Gumbels that decide samples.
    uniform = ((word & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2.0**-31
    exponential = -torch.log1p(-uniform.clamp_(max=1.0 - 2.0**-24))
    return -torch.log(exponential)
