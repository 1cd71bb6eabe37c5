"""Keys that rows share, read once for several rows, give what the torch reference gives of keys read for each."""

from dataclasses import replace

import pytest
import torch
import triton.language as tl
from test_paged_attention import TOLERANCE, case

from liveroll.attention.fast import GpuAttention
from liveroll.attention.layout import PagedLayout, SharedPrefixes
from liveroll.attention.reference import ReferenceAttention
from liveroll.kernels.early import starts_early
from liveroll.kernels.prefix_attention import attend_prefixes, rows_together
from liveroll.model.geometry import AttentionTraits

# Of rows 1 and 3 the shared keys are cut into six splits.
LENGTHS, LONG = [401, 1361, 656, 1500, 5, 402], {(3, 1): 84, (0, 5): 25}
SHAPE = {"heads": 4, "kv_heads": 2, "key_dim": 16, "value_dim": 16, "page_size": 16}


def sharing(clusters, together, *, lengths, **shape):
    """A case whose rows share their first pages: `clusters` maps rows to the number of pages."""
    query, key, value, keys, values, layout = case(lengths=lengths, **shape)
    size, device = keys.shape[1], query.device
    table, shared = layout.block_table.clone(), torch.zeros(len(lengths), dtype=torch.int32)
    members = torch.full((len(lengths) // 2, together), -1, dtype=torch.int32)
    tokens = torch.zeros(len(members), dtype=torch.int32)
    for cluster, (rows, pages) in enumerate(clusters.items()):
        table[list(rows), :pages] = table[rows[0], :pages]
        members[cluster, : len(rows)] = torch.tensor(rows, dtype=torch.int32)
        tokens[cluster] = shared[list(rows)] = pages * size
    count = torch.tensor([len(clusters)], dtype=torch.int32)
    prefixes = SharedPrefixes(*(tensor.to(device) for tensor in (count, members, tokens, shared)))
    return query, key, value, keys, values, PagedLayout(table, layout.lengths, layout.index, layout.longest, prefixes)


def check(query, key, value, keys, values, layout, traits, sinks=None):
    wide = [tensor.double() for tensor in (query, key, value, keys, values)]
    expected = ReferenceAttention().paged(*wide, layout, traits, None if sinks is None else sinks.double())
    attention = GpuAttention(query.device, len(query) * keys.shape[2])
    # A captured step has a higher bound than an eager one, and sums in the same order.
    layouts = layout, replace(layout, longest=4 * layout.longest)
    got = [attention.paged(query, key, value, keys, values, bounded, traits, sinks) for bounded in layouts]
    assert got[0].equal(got[1])
    torch.testing.assert_close(got[0].double(), expected, atol=TOLERANCE[query.dtype], rtol=TOLERANCE[query.dtype])
    return got[0]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_head_dimensions(device, dtype, dim):
    """Guards against lanes beyond a head that is no power of two wide."""
    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter has no bf16 matrix product")
    shape = SHAPE | {"key_dim": dim, "value_dim": dim, "device": device, "dtype": dtype}
    clusters = {(0, 2, 3): 2, (1, 4): 4}
    given = sharing(clusters, rows_together(2, dtype), lengths=[40, 70, 33, 50, 66], **shape)
    check(*given, AttentionTraits(dim**-0.5, None, None))


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (16, 2), (7, 1), (5, 1), (32, 2)])
@pytest.mark.parametrize("page_size", [16, 64, 20])
def test_groups_and_pages(device, heads, kv_heads, page_size):
    """Guards against queries of one row that are answered to another, and offsets within a page."""
    shape = SHAPE | {"heads": heads, "kv_heads": kv_heads, "page_size": page_size}
    together = rows_together(heads // kv_heads, torch.float16)
    clusters = {(3, 1): 3, (0, 5, 2): 1} if together > 2 else {(3, 1): 3, (0, 5): 1}
    lengths = [page_size + 1, 3 * page_size + 9, 300, 500, 7, 2 * page_size]
    given = sharing(clusters, together, device=device, dtype=torch.float16, lengths=lengths, **shape)
    check(*given, AttentionTraits(0.25, None, None))


def test_rows_of_many_heads(device):
    """Guards against clusters of no row, or of one, for the query heads that no program takes for two rows."""
    half, full = torch.bfloat16, torch.float32
    for group, dtype, rows in (
        (1, half, 16), (32, half, 2), (33, half, 1), (128, half, 1), (8, full, 2), (9, full, 1), (1, torch.float64, 1)
    ):  # fmt: skip
        assert GpuAttention(device, 1).rows_together(group, dtype) == rows


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("name", "number"), [("_MOST_SPLITS", 2), ("_MOST_SPLITS", 4), ("_PROGRAMS", 3), ("_PARTS", tl.constexpr(7))]
)
def test_how_shared_keys_are_cut(monkeypatch, device, name, number):
    """Guards against shared keys that one kernel cuts otherwise than the other merges them, or that nobody reads."""
    if name == "_PARTS" and device.type == "cuda":
        pytest.skip("what is compiled into a kernel cannot be changed")
    monkeypatch.setattr(f"liveroll.kernels.prefix_attention.{name}", number)
    given = sharing(LONG, 8, device=device, dtype=torch.float32, lengths=LENGTHS, **SHAPE)
    check(*given, AttentionTraits(0.3, None, None))


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("most", "splits"), [(23, 3), (5, 1)])
def test_partial_results_are_bounded(monkeypatch, device, most, splits):
    """Guards against results of many rows that fill the memory, and against no split at all of more rows still."""
    monkeypatch.setattr("liveroll.kernels.prefix_attention._MOST_PARTIAL", most)
    given = sharing(LONG, 8, device=device, dtype=torch.float32, lengths=LENGTHS, **SHAPE)
    query, _, _, keys, values, layout = given
    part = attend_prefixes(
        query, keys, values, layout.block_table, layout.prefixes, longest=layout.longest, scale=0.3, softcap=None
    )
    assert part.partial.shape[:3] == part.weight.shape == (6, 4, splits)
    check(*given, AttentionTraits(0.3, None, None))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_several_splits(device, softcap, with_sinks):
    """Guards against a cap or sink that is lost, or counted twice, where shared keys and a row's own are split."""
    given = sharing(LONG, 8, device=device, dtype=torch.float32, lengths=LENGTHS, **SHAPE)
    sinks = torch.linspace(-2, 4, 4, device=device) if with_sinks else None
    check(*given, AttentionTraits(0.3, None, softcap), sinks)


def test_windows_read_for_each_row(device):
    """Guards against keys that a row of the cluster does not see any more."""
    given = sharing({(0, 1, 2): 6}, 8, device=device, dtype=torch.float32, lengths=[100, 120, 200, 9], **SHAPE)
    check(*given, AttentionTraits(0.3, 30, None))


def test_shared_keys_are_read_once(device):
    """Guards against a kernel that reads all keys for each row, with the same result: only the first row's count."""
    given = sharing({(0, 1): 2}, 8, device=device, dtype=torch.float32, lengths=[40, 50, 60], **SHAPE)
    traits, layout = AttentionTraits(0.3, None, None), given[-1]
    before = check(*given, traits)
    layout.block_table[1, :2] = 0  # whose keys are not numbers
    attention = GpuAttention(device, 6)
    assert attention.paged(*given[:-1], layout, traits, None).equal(before)


def test_no_cluster_at_all(device):
    """Guards against a step whose rows share nothing any more, and one of a single row, where none can."""
    for lengths in ([40, 50], [40]):
        check(
            *sharing({}, 8, device=device, dtype=torch.float32, lengths=lengths, **SHAPE),
            AttentionTraits(0.3, None, None),
        )


def test_results_of_shared_keys_are_waited_for(monkeypatch, device):
    """Guards against results that are merged before they are written, by a kernel that starts while the other runs."""
    if not starts_early(device):
        pytest.skip("here no kernel starts before the one ahead of it has ended")
    clusters = {tuple(range(first, first + 8)): 16 for first in range(0, 512, 8)}
    shape = SHAPE | {"heads": 16, "key_dim": 128, "value_dim": 128, "device": device, "dtype": torch.bfloat16}
    query, *others, layout = sharing(clusters, 8, lengths=[384] * 512, **shape)
    attention, traits = GpuAttention(device, 1024), AttentionTraits(128**-0.5, None, None)
    # Each time other queries: what an earlier one has left is nowhere right.
    queries = [query.roll(turn, 0) for turn in range(20)]

    def attend():
        return [attention.paged(turned, *others, layout, traits, None) for turned in queries]

    attend()
    # Launched one by one, the first kernel would have ended before the host comes to the second.
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        early = attend()
    graph.replay()
    for module in ("prefix_attention", "paged_attention"):
        monkeypatch.setattr(f"liveroll.kernels.{module}.starts_early", lambda _: False)
    for one, other in zip(early, attend(), strict=True):
        assert one.equal(other)
