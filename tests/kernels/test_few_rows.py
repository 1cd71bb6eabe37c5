"""Products of few rows give what the model's own steps give, one after the other."""

import pytest
import torch
from torch.nn import functional

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
# Sizes that fill tiles and steps, and that end within one.
SIZES = [(128, 192), (96, 80), (40, 1000)]
ROWS = [1, 16, 33, 64, 65]


def tensors(device, dtype, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def skip_without(device, dtype):
    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter has no bf16 matrix product")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_gated_product(device, dtype, rows, outputs, inputs):
    """Guards against lanes beyond rows, outputs or inputs, halves mixed up, and results that are not rounded."""
    from liveroll.kernels.few_rows import gated_product

    skip_without(device, dtype)
    x, weight = tensors(device, dtype, (rows, inputs), (2 * outputs, inputs))
    weight *= inputs**-0.5
    gate, up = functional.linear(x.double(), weight.double()).to(dtype).chunk(2, -1)
    got = gated_product(x, weight)
    assert got.dtype == dtype
    torch.testing.assert_close(got, functional.silu(gate) * up, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.thinned(5)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_normed_product(device, dtype, rows, outputs, inputs):
    """Guards against parts of the sum that are lost or taken twice, and a mean over lanes that are not there."""
    from liveroll.kernels.few_rows import normed_product

    skip_without(device, dtype)
    x, weight, residual, scale = tensors(device, dtype, (rows, inputs), (outputs, inputs), (rows, outputs), (outputs,))
    weight *= inputs**-0.5
    sums = residual + functional.linear(x.double(), weight.double()).to(dtype)
    added, normed = normed_product(x, weight, residual, scale, 1e-6)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(added, sums, atol=tolerance, rtol=tolerance)
    # What is normed is the sum as it was rounded.
    wide = added.float()
    expected = scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    torch.testing.assert_close(normed, expected, atol=tolerance, rtol=tolerance)


def test_rows_do_not_depend_on_one_another(device):
    """Guards against sums whose order depends on how many rows there are: a row alone is the same, bit for bit."""
    from liveroll.kernels.few_rows import gated_product, normed_product

    dtype = torch.float16
    x, up, down, residual, scale = tensors(device, dtype, (64, 320), (256, 320), (48, 320), (64, 48), (48,))
    together, (added, normed) = gated_product(x, up), normed_product(x, down, residual, scale, 1e-6)
    for count in (1, 7, 20, 40):
        assert torch.equal(gated_product(x[:count], up), together[:count])
        alone = normed_product(x[:count], down, residual[:count], scale, 1e-6)
        assert torch.equal(alone[0], added[:count])
        assert torch.equal(alone[1], normed[:count])
