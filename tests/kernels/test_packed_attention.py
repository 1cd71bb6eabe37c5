"""The prefill kernel gives what the torch reference gives."""

import pytest
import torch

from liveroll.attention.layout import PackedLayout
from liveroll.attention.reference import ReferenceAttention
from liveroll.model.geometry import AttentionTraits

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# One sequence over several blocks, short ones that share a block, single tokens, and an end within a block.
LENGTHS = (16, 1, 1, 150, 7, 33, 16, 16, 1, 5)


def check(device, dtype, *, heads=4, kv_heads=2, key_dim=16, value_dim=None, traits, lengths=LENGTHS, sinks=None):
    from liveroll.kernels.packed_attention import packed_attention

    generator = torch.Generator().manual_seed(0)
    tokens, value_dim = sum(lengths), value_dim or key_dim
    # The parts of a fused product lie behind one another, so no part is contiguous.
    joint = torch.randn(tokens, heads + kv_heads, key_dim, generator=generator).to(device, dtype)
    query, key = joint.split((heads, kv_heads), dim=1)
    value = torch.randn(tokens, kv_heads, value_dim, generator=generator).to(device, dtype)
    layout = PackedLayout.of(lengths, device)
    wide = [tensor.double() for tensor in (query, key, value)]
    expected = ReferenceAttention().packed(*wide, layout, traits, None if sinks is None else sinks.double())
    got = packed_attention(
        query,
        key,
        value,
        layout.column,
        scale=traits.scale,
        window=traits.window,
        softcap=traits.softcap,
        sinks=sinks,
    )
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (256, 256), (512, 512), (48, 32)]
)
def test_head_dimensions(device, dtype, key_dim, value_dim):
    """Guards against lanes beyond a head that is no power of two wide."""
    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter has no bf16 matrix product")
    traits = AttentionTraits(key_dim**-0.5, None, None)
    check(device, dtype, heads=2, kv_heads=1, key_dim=key_dim, value_dim=value_dim, traits=traits)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("lengths", [(1,), (512,), (16,) * 32, (1,) * 65, (64, 64), (63, 2, 63), LENGTHS])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2)])
def test_sequences_and_groups(device, lengths, heads, kv_heads):
    """Guards against keys of a neighbour in a block, keys that are left out, and mixed-up heads of a group."""
    traits = AttentionTraits(0.25, None, None)
    check(device, torch.float32, heads=heads, kv_heads=kv_heads, traits=traits, lengths=lengths)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("window", [None, 1, 8, 70, 200])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_traits(device, window, softcap, with_sinks):
    """Guards against a window that begins in the sequence before, and a cap or sink that is lost."""
    sinks = torch.linspace(-2, 4, 4, device=device) if with_sinks else None
    check(device, torch.float32, traits=AttentionTraits(0.3, window, softcap), sinks=sinks)


def test_what_stands_behind_is_not_seen(device):
    """Guards against tokens whose attention depends on what stands behind them, in their own sequence too."""
    from liveroll.kernels.packed_attention import packed_attention

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(100, 2, 16, generator=generator).to(device) for _ in range(3))
    column = PackedLayout.of([40, 60], device).column
    settings = {"scale": 0.25, "window": None, "softcap": None, "sinks": None}
    whole = packed_attention(query, key, value, column, **settings)
    part = packed_attention(query[:64], key[:64], value[:64], column[:64], **settings)
    torch.testing.assert_close(part, whole[:64], rtol=0, atol=1e-6)
