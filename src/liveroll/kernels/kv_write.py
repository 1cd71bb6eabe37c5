"""Keys and values of new tokens into their pages, in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from liveroll.kernels.lanes import lanes_for


@triton.jit
def _write(
    key, value, keys, values, index, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.load(index + token)
    k = tl.arange(0, K_SIZE)
    from_k = key + token * k_token + (k // K_DIM) * k_head + k % K_DIM
    tl.store(keys + at * (HEADS * K_DIM) + k, tl.load(from_k, mask=k < HEADS * K_DIM), mask=k < HEADS * K_DIM)
    v = tl.arange(0, V_SIZE)
    from_v = value + token * v_token + (v // V_DIM) * v_head + v % V_DIM
    tl.store(values + at * (HEADS * V_DIM) + v, tl.load(from_v, mask=v < HEADS * V_DIM), mask=v < HEADS * V_DIM)


def write_kv(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> None:
    """Store tokens in a layer's pages.

    Args:
        key: `[T, kv_heads, key_dim]`, the last dimension contiguous.
        value: `[T, kv_heads, value_dim]`, the same.
        keys: `[pages, page_size, kv_heads, key_dim]`, contiguous, of the same dtype.
        values: `[pages, page_size, kv_heads, value_dim]`, the same.
        index: `[T]` int64, page × page_size + offset of each token.
    """
    tokens, heads, key_dim = key.shape
    value_dim = value.shape[2]
    _write[(tokens,)](
        key, value, keys, values, index, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        HEADS=heads, K_DIM=key_dim, V_DIM=value_dim, K_SIZE=lanes_for(heads * key_dim),
        V_SIZE=lanes_for(heads * value_dim), num_warps=1 if heads * key_dim <= 512 else 4,
        enable_fp_fusion=True,
    )  # fmt: skip
