"""The decode kernel gives what the torch reference gives."""

import pytest
import torch

from liveroll.attention.fast import GpuAttention
from liveroll.attention.layout import PagedLayout
from liveroll.attention.reference import ReferenceAttention
from liveroll.model.geometry import AttentionTraits

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def case(device, dtype, *, heads, kv_heads, key_dim, value_dim, page_size, lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    width = -(-max(lengths) // page_size)
    pages = 1 + len(lengths) * width
    table = 1 + torch.randperm(pages - 1, generator=generator).view(len(lengths), width).int().to(device)
    position = torch.tensor(lengths) - 1
    index = table.cpu()[torch.arange(len(lengths)), position // page_size] * page_size + position % page_size
    layout = PagedLayout(
        table, torch.tensor(lengths, device=device), index.long().to(device), longest=width * page_size
    )
    keys, values = normal(pages, page_size, kv_heads, key_dim), normal(pages, page_size, kv_heads, value_dim)
    # Whatever lies in pages behind a row's end must not reach the result.
    keys[0], values[0] = float("nan"), float("nan")
    new = normal(len(lengths), kv_heads, key_dim), normal(len(lengths), kv_heads, value_dim)
    return normal(len(lengths), heads, key_dim), *new, keys, values, layout


def check(query, key, value, keys, values, layout, traits, sinks=None):
    from liveroll.kernels.paged_attention import paged_attention

    arrived = torch.zeros(keys.shape[2] * len(query), dtype=torch.int32, device=query.device)
    wide = [tensor.double() for tensor in (query, key, value, keys, values)]
    expected = ReferenceAttention().paged(*wide, layout, traits, None if sinks is None else sinks.double())
    for _ in range(2):
        got = paged_attention(
            query,
            key,
            value,
            keys,
            values,
            layout.block_table,
            layout.lengths,
            layout.index,
            arrived,
            longest=layout.longest,
            scale=traits.scale,
            window=traits.window,
            softcap=traits.softcap,
            sinks=sinks,
        )
        compare(got, expected)
        # What counts the splits of a row begins anew in the next layer.
        assert not arrived.any()
    for stored, exact in ((keys, wide[3]), (values, wide[4])):
        assert stored.double().nan_to_num().equal(exact.nan_to_num())


def compare(got, expected):
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[got.dtype], rtol=TOLERANCE[got.dtype])


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (256, 256), (512, 512), (48, 32)]
)
def test_head_dimensions(device, dtype, key_dim, value_dim):
    """Guards against lanes beyond a head that is no power of two wide."""
    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter has no bf16 matrix product")
    query, *rest = case(
        device, dtype, heads=4, kv_heads=2, key_dim=key_dim, value_dim=value_dim, page_size=16, lengths=[1, 40, 70]
    )
    check(query, *rest, AttentionTraits(key_dim**-0.5, None, None))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("page_size", [16, 64, 256, 20])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (16, 2), (6, 2), (5, 1)])
def test_groups_and_pages(device, page_size, heads, kv_heads):
    """Guards against mixed-up heads of a group and offsets within a page."""
    query, *rest = case(
        device,
        torch.float32,
        heads=heads,
        kv_heads=kv_heads,
        key_dim=16,
        value_dim=16,
        page_size=page_size,
        lengths=[5, 130, 64],
    )
    check(query, *rest, AttentionTraits(0.25, None, None))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("window", [None, 1, 8, 200])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_traits_over_several_splits(device, window, softcap, with_sinks):
    """Guards against a window, cap or sink that is lost, or counted twice, where a row is split."""
    query, *rest = case(
        device,
        torch.float32,
        heads=4,
        kv_heads=1,
        key_dim=16,
        value_dim=16,
        page_size=16,
        lengths=[1, 127, 128, 129, 600],
    )
    sinks = torch.linspace(-2, 4, 4, device=device) if with_sinks else None
    check(query, *rest, AttentionTraits(0.3, window, softcap), sinks)


def test_the_bound_changes_no_bit(device):
    """Guards against a captured step, whose bound is higher, that sums in another order than an eager one."""
    from liveroll.kernels.paged_attention import paged_attention

    shape = {"heads": 4, "kv_heads": 1, "key_dim": 16, "value_dim": 16, "page_size": 16}
    query, key, value, keys, values, layout = case(device, torch.float32, lengths=[1, 100, 129, 656, 1500], **shape)
    arrived = torch.zeros(len(query), dtype=torch.int32, device=query.device)
    shared = (query, key, value, keys, values, layout.block_table, layout.lengths, layout.index, arrived)
    traits = {"scale": 0.3, "window": None, "softcap": None, "sinks": None}
    expected = paged_attention(*shared, longest=1500, **traits)
    for longest in (1504, 1600, 4096, 32768):
        assert paged_attention(*shared, longest=longest, **traits).equal(expected)


def test_doubles_are_left_to_the_reference(device):
    """Guards against a kernel for numbers that it does not compile for, where the interpreter sees nothing wrong."""
    query, key, value, keys, values, layout = case(
        device, torch.float64, heads=4, kv_heads=2, key_dim=16, value_dim=16, page_size=16, lengths=[1, 40, 70]
    )
    traits = AttentionTraits(0.25, None, None)
    pages = keys.clone(), values.clone()
    expected = ReferenceAttention().paged(query, key, value, *pages, layout, traits, None)
    got = GpuAttention(device, 6).paged(query, key, value, keys, values, layout, traits, None)
    torch.testing.assert_close(got, expected, atol=1e-14, rtol=1e-14)


def test_kv_write(device):
    """Guards against tokens written to the wrong page or head, from tensors that are not contiguous."""
    from liveroll.kernels.kv_write import write_kv

    keys, values = torch.zeros(5, 4, 3, 8, device=device), torch.zeros(5, 4, 3, 6, device=device)
    key = (
        torch.randn(2, 3, 7, 8, device=device)
        .transpose(1, 2)
        .reshape(14, 3, 8)[:7]
        .transpose(0, 1)
        .contiguous()
        .transpose(0, 1)
    )
    value = torch.randn(7, 3, 6, device=device)
    index = torch.tensor([4, 19, 7, 8, 12, 5, 6], device=device)
    write_kv(key, value, keys, values, index)
    expected = torch.zeros_like(keys).flatten(0, 1).index_copy(0, index, key)
    assert keys.flatten(0, 1).equal(expected)
    assert values.flatten(0, 1).equal(torch.zeros_like(values).flatten(0, 1).index_copy(0, index, value))
