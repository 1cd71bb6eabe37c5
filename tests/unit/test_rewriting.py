"""A traced forward is rewritten where, and only where, it computes what an operator computes."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from liveroll.model.rewriting import rewrite

WIDTH, INNER, EPSILON = 16, 24, 1e-6


class Block(nn.Module):
    """A residual block as transformers writes it, with its gate and up projections as one product."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate_up = nn.Parameter(torch.randn(2 * INNER, WIDTH, generator=generator) / 4)
        self.down = nn.Parameter(torch.randn(WIDTH, INNER, generator=generator) / 4)
        self.scale = nn.Parameter(torch.randn(WIDTH, generator=generator))

    def gated(self, x):
        gate, up = functional.linear(x, self.gate_up).split([INNER, INNER], -1)
        return functional.silu(gate) * up

    def norm(self, x):
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.scale * (wide * torch.rsqrt(variance + EPSILON)).to(x.dtype)

    def forward(self, x):
        added = x + functional.linear(self.gated(x), self.down)
        return added, self.norm(added)


class OtherGate(Block):
    def gated(self, x):
        gate, up = functional.linear(x, self.gate_up).split([INNER, INNER], -1)
        return functional.gelu(gate) * up


class GateOfUp(Block):
    def gated(self, x):
        gate, up = functional.linear(x, self.gate_up).split([INNER, INNER], -1)
        return functional.silu(up) * gate


class GateReadTwice(Block):
    def gated(self, x):
        gate, up = functional.linear(x, self.gate_up).split([INNER, INNER], -1)
        activated = functional.silu(gate)
        return activated * up + activated


class UnevenParts(Block):
    def __init__(self):
        super().__init__()
        self.down = nn.Parameter(torch.ones(WIDTH, 2 * INNER - 1))

    def gated(self, x):
        gate, up = functional.linear(x, self.gate_up).split([1, 2 * INNER - 1], -1)
        return functional.silu(gate) * up


class PartsOfAnotherAxis(Block):
    def __init__(self):
        super().__init__()
        self.down = nn.Parameter(torch.ones(WIDTH, 2 * INNER))

    def gated(self, x):
        gate, up = functional.linear(torch.cat([x, 2 * x], 1), self.gate_up).split([1, 1], 1)
        return functional.silu(gate) * up


class Biased(Block):
    def gated(self, x):
        return functional.linear(x, self.gate_up, self.gate_up[:, 0]).split([INNER, INNER], -1)[0]

    def forward(self, x):
        added = x + functional.linear(self.gated(x), self.down, self.scale)
        return added, self.norm(added)


class CenteredNorm(Block):
    def norm(self, x):
        wide = x.to(torch.float32)
        variance = (wide - wide.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)
        return self.scale * (wide * torch.rsqrt(variance + EPSILON)).to(x.dtype)


class NormOfAnotherAxis(Block):
    def norm(self, x):
        wide = x.to(torch.float32)
        return self.scale * (wide * torch.rsqrt(wide.pow(2).mean(0, keepdim=True) + EPSILON)).to(x.dtype)


class CubeNorm(Block):
    def norm(self, x):
        wide = x.to(torch.float32)
        return self.scale * (wide * torch.rsqrt(wide.pow(3).mean(-1, keepdim=True) + EPSILON)).to(x.dtype)


class VarianceIsReturned(Block):
    def norm(self, x):
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.scale * (wide * torch.rsqrt(variance + EPSILON)).to(x.dtype) + variance


class ComputedScale(Block):
    def norm(self, x):
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return (1 + self.scale) * (wide * torch.rsqrt(variance + EPSILON)).to(x.dtype)


class OneScale(Block):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class ProductReadTwice(Block):
    def forward(self, x):
        product = functional.linear(self.gated(x), self.down)
        added = x + product
        return added + product, self.norm(added)


class Broadcast(Block):
    def forward(self, x):
        added = x[:1] + functional.linear(self.gated(x), self.down)
        return added, self.norm(added)


def gate_of(product, half):
    gate, up = product.split([half, half], -1)
    return functional.silu(gate) * up


def run_rewritten(module, x):
    """How many places of a module's forward are rewritten, and what it gives then."""
    counts = []

    def backend(graph, inputs):
        counts.append(rewrite(graph, serves=lambda tensor: True))
        return graph.forward

    with torch.no_grad():
        outputs = torch.compile(module, backend=backend, fullgraph=True)(x)
    torch._dynamo.reset()
    return counts, outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_fits_is_rewritten(dtype):
    """Guards against a pattern that no longer fits what models do, and an operator that does something else."""
    module = Block().to(dtype)
    x = torch.randn(3, 1, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    counts, outputs = run_rewritten(module, x)
    assert counts == [2]
    with torch.no_grad():
        torch.testing.assert_close(outputs, module(x), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("kind", "rewritten"),
    [
        (OtherGate, 1),
        (GateOfUp, 1),
        (GateReadTwice, 1),
        (UnevenParts, 1),
        (PartsOfAnotherAxis, 1),
        (Biased, 0),
        (CenteredNorm, 1),
        (NormOfAnotherAxis, 1),
        (CubeNorm, 1),
        (VarianceIsReturned, 1),
        (ComputedScale, 1),
        (OneScale, 1),
        (ProductReadTwice, 1),
        (Broadcast, 1),
    ],
)
def test_what_only_looks_alike_is_left(kind, rewritten):
    """Guards against a rewrite of something else than the operator computes, for each condition that is looked at."""
    module = kind()
    x = torch.randn(3, 1, WIDTH, generator=torch.Generator().manual_seed(1))
    counts, outputs = run_rewritten(module, x)
    assert counts == [rewritten]
    with torch.no_grad():
        torch.testing.assert_close(outputs, module(x), atol=0, rtol=0, equal_nan=True)


def test_products_that_autocast_rounds_otherwise():
    """Guards against an operator that gives the dtype of its weights where autocast asks for another."""
    module, x = Block().half(), torch.ones(3, 1, WIDTH, dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        counts, outputs = run_rewritten(module, x)
    assert counts == [0]
    assert [output.dtype for output in outputs] == [torch.float32, torch.float32]


def test_weights_that_32_bits_cannot_address():
    """Guards against a kernel whose offsets overflow."""
    module, x = Block().to("meta"), torch.ones(3, 1, WIDTH, device="meta")
    for rows, expected in ((2**27 - 2, 2), (2**27, 1)):
        module.gate_up = nn.Parameter(torch.empty(rows, WIDTH, device="meta"))
        module.down = nn.Parameter(torch.empty(WIDTH, rows // 2, device="meta"))
        module.gated = lambda x, half=rows // 2: gate_of(functional.linear(x, module.gate_up), half)
        assert run_rewritten(module, x)[0] == [expected]


def test_the_cpu_and_float32_are_left_to_the_compiler():
    """Guards against operators where there are no kernels, or where rounding must be that of the model."""
    counts = []

    def backend(graph, inputs):
        counts.append(rewrite(graph))
        return graph.forward

    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            torch.compile(Block().to(dtype), backend=backend, fullgraph=True)(torch.ones(3, 1, WIDTH, dtype=dtype))
        torch._dynamo.reset()
    assert counts == [0, 0]
