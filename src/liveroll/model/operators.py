"""Operators that compiled forwards run in the place of several of the model's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


@torch.library.custom_op("liveroll::gated_product", mutates_args=())
def gated_product(input: Tensor, weight: Tensor) -> Tensor:
    """`silu(x G) * (x U)`, `[..., N]`, of inputs `[..., K]` and the weights `[2 N, K]` of G and U."""
    if not input.is_cuda:
        gate, up = functional.linear(input, weight).chunk(2, -1)
        return functional.silu(gate) * up
    from liveroll.kernels import few_rows

    output = few_rows.gated_product(_rows(input), weight)
    return output.view(*input.shape[:-1], output.shape[-1])


@gated_product.register_fake
def _(input: Tensor, weight: Tensor) -> Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0] // 2)


@torch.library.custom_op("liveroll::normed_product", mutates_args=())
def normed_product(
    input: Tensor, weight: Tensor, residual: Tensor, scale: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """`r + x W` and its RMS norm, both `[..., N]`, of inputs `[..., K]`, weights `[N, K]` and `[N]` of the norm."""
    if not input.is_cuda:
        added = residual + functional.linear(input, weight)
        wide = added.float()
        return added, scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(input.dtype)
    from liveroll.kernels import few_rows

    added, normed = few_rows.normed_product(_rows(input), weight, _rows(residual), scale, epsilon)
    return added.view(residual.shape), normed.view(residual.shape)


@normed_product.register_fake
def _(input: Tensor, weight: Tensor, residual: Tensor, scale: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(residual), torch.empty_like(residual)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()
