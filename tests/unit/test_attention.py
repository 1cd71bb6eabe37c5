"""The reference attention equals a sum over keys, written out token by token in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from liveroll.attention.layout import PackedLayout, PagedLayout
from liveroll.attention.reference import ReferenceAttention
from liveroll.model.geometry import AttentionTraits

CPU = torch.device("cpu")
LENGTHS = (1, 9, 4, 5, 12)


@dataclass(frozen=True)
class Shape:
    """Heads and dimensions of a layer, and how it attends."""

    query_heads: int = 4
    kv_heads: int = 4
    key_dim: int = 8
    value_dim: int = 8
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def traits(self) -> AttentionTraits:
        return AttentionTraits(0.7 / math.sqrt(self.key_dim), self.window, self.softcap)

    def tensors(self, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query, key and value of packed tokens, and sinks; scores are wide enough for soft-caps to show."""
        generator = torch.Generator().manual_seed(seed)
        sizes = ((self.query_heads, self.key_dim), (self.kv_heads, self.key_dim), (self.kv_heads, self.value_dim))
        query, key, value = (torch.randn(tokens, *size, generator=generator) * 2 for size in sizes)
        return query, key, value, torch.randn(self.query_heads, generator=generator) * 3 if self.sinks else None


SHAPES = {
    "multi-head": Shape(),
    "grouped": Shape(kv_heads=2),
    "multi-query": Shape(kv_heads=1),
    "window": Shape(kv_heads=2, window=4),
    "window of one": Shape(window=1),
    "window wider than all": Shape(window=99),
    "soft-cap": Shape(kv_heads=2, softcap=1.5),
    "sinks": Shape(kv_heads=2, sinks=True),
    "narrow values": Shape(kv_heads=2, value_dim=4),
    "wide values": Shape(kv_heads=1, value_dim=12, softcap=2.0),
    "all": Shape(query_heads=6, kv_heads=3, value_dim=4, window=3, softcap=2.0, sinks=True),
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def attend(query: Tensor, key: Tensor, value: Tensor, shape: Shape, sinks: Tensor | None) -> Tensor:
    """Attention of one sequence `[T, heads, dim]`, token by token and head by head."""
    groups = shape.query_heads // shape.kv_heads
    output = torch.zeros(len(query), shape.query_heads, shape.value_dim, dtype=torch.float64)
    for token in range(len(query)):
        first = 0 if shape.window is None else max(0, token - shape.window + 1)
        for head in range(shape.query_heads):
            weights = []
            for other in range(first, token + 1):
                score = float(query[token, head].double() @ key[other, head // groups].double()) * shape.traits.scale
                if shape.softcap is not None:
                    score = shape.softcap * math.tanh(score / shape.softcap)
                weights.append(math.exp(score))
            total = sum(weights) + (0 if sinks is None else math.exp(float(sinks[head])))
            for other, weight in zip(range(first, token + 1), weights, strict=True):
                output[token, head] += weight / total * value[other, head // groups].double()
    return output


def attend_each(shape: Shape, lengths, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
    """`attend` of each of several packed sequences."""
    parts = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
    return torch.cat([attend(*part, shape, sinks) for part in parts])


def paged(
    shape: Shape, lengths, page_size: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, **kwargs
) -> Tensor:
    """`ReferenceAttention.paged` of the last token of packed sequences whose pages are scrambled."""
    counts = [-(-length // page_size) for length in lengths]
    generator = torch.Generator().manual_seed(len(lengths))
    pages = (torch.randperm(sum(counts) + 5, generator=generator) + 1)[: sum(counts)].split(counts)
    # What stands in free pages, and behind a row's last key, is not zero.
    keys = torch.randn(sum(counts) + 6, page_size, *key.shape[1:], generator=generator) * 9
    values = torch.randn(sum(counts) + 6, page_size, *value.shape[1:], generator=generator) * 9
    table = torch.zeros(len(lengths), max(counts) + kwargs.get("spare", 0), dtype=torch.int32)
    for row, (own, ks, vs) in enumerate(zip(pages, key.split(lengths), value.split(lengths), strict=True)):
        table[row, : len(own)] = own
        for position in range(len(ks) - 1):
            place = own[position // page_size], position % page_size
            keys[place], values[place] = ks[position], vs[position]
    last = torch.tensor(lengths).cumsum(0) - 1
    position = torch.tensor(lengths) - 1
    index = table[torch.arange(len(lengths)), position // page_size] * page_size + position % page_size
    layout = PagedLayout(table, torch.tensor(lengths), index.long(), max(lengths) + kwargs.get("bound", 0))
    return ReferenceAttention().paged(query[last], key[last], value[last], keys, values, layout, shape.traits, sinks)


def last_of(lengths, packed: Tensor) -> Tensor:
    return packed[torch.tensor(lengths).cumsum(0) - 1]


def close(ours: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


@each_shape
@pytest.mark.parametrize("lengths", [LENGTHS, (6,), (1, 1, 1), (5, 5)], ids=str)
def test_packed(shape, lengths):
    """Guards against tokens that see another sequence, a later token, or a window off by one."""
    query, key, value, sinks = shape.tensors(sum(lengths))
    ours = ReferenceAttention().packed(query, key, value, PackedLayout.of(lengths, CPU), shape.traits, sinks)
    assert ours.shape == (sum(lengths), shape.query_heads, shape.value_dim)
    close(ours, attend_each(shape, lengths, query, key, value, sinks))


@each_shape
@pytest.mark.parametrize("page_size", [1, 4])
def test_paged(shape, page_size):
    """Guards against pages read in another order, stale keys behind a row's last, and a window off by one."""
    tensors = shape.tensors(sum(LENGTHS), seed=1)
    ours = paged(shape, LENGTHS, page_size, *tensors)
    assert ours.shape == (len(LENGTHS), shape.query_heads, shape.value_dim)
    close(ours, last_of(LENGTHS, attend_each(shape, LENGTHS, *tensors)))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    shape=st.sampled_from(list(SHAPES.values())),
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=5),
    page_size=st.integers(1, 6),
    spare=st.integers(0, 3),
    bound=st.integers(0, 9),
)
def test_paged_continues_packed(shape, lengths, page_size, spare, bound):
    """Guards against a decode step that attends otherwise than the prefill before it.

    Spare columns of the block table and a loose bound of the lengths, as captured steps have them, change nothing.
    """
    tensors = shape.tensors(sum(lengths), seed=2)
    query, key, value, sinks = tensors
    packed = ReferenceAttention().packed(query, key, value, PackedLayout.of(lengths, CPU), shape.traits, sinks)
    bound = min(bound, (spare + -(-max(lengths) // page_size)) * page_size - max(lengths))
    ours = paged(shape, lengths, page_size, *tensors, spare=spare, bound=bound)
    torch.testing.assert_close(ours, last_of(lengths, packed), rtol=1e-5, atol=1e-5)


def test_masks_are_made_once_for_each_window():
    """Guards against layers with and without a window that share the mask of the first of them."""
    full, windowed = Shape(kv_heads=2), Shape(kv_heads=2, window=3)
    query, key, value, _ = full.tensors(8)
    layout = PagedLayout(torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([8]), torch.tensor([11]), 8)
    keys = torch.cat([torch.zeros(4, 2, 8), key]).view(3, 4, 2, 8)
    values = torch.cat([torch.zeros(4, 2, 8), value]).view(3, 4, 2, 8)
    backend = ReferenceAttention()
    for shape in (full, windowed, full, windowed):
        ours = backend.paged(query[-1:], key[-1:], value[-1:], keys, values, layout, shape.traits, None)
        close(ours[0], attend(query, key, value, shape, None)[-1])
    (group,) = layout.groups(4)
    assert len(group.masks) == 2


@given(st.lists(st.integers(1, 90), min_size=1, max_size=20), st.sampled_from([1, 4, 16]))
def test_groups_of_like_rows(lengths, page_size):
    """Guards against rows lost or taken twice, pages of another row, and short rows padded to a long one."""
    counts = [-(-length // page_size) for length in lengths]
    table = torch.arange(len(lengths) * 100, dtype=torch.int32).view(-1, 100)
    layout = PagedLayout(table, torch.tensor(lengths), torch.tensor(lengths), max(lengths) + 7)
    seen = []
    for group in layout.groups(page_size):
        rows = list(range(len(lengths))) if group.rows is None else group.rows.tolist()
        assert group.lengths.tolist() == [lengths[row] for row in rows]
        pages = group.pages.view(len(rows), -1)
        assert pages.shape[1] == max(counts[row] for row in rows) <= 2 * min(counts[row] for row in rows)
        assert torch.equal(pages, table[rows, : pages.shape[1]])
        seen += rows
    assert sorted(seen) == list(range(len(lengths)))
    assert layout.groups(page_size) is layout.groups(page_size)


def test_packed_layout():
    """Guards against positions that run on from one sequence to the next."""
    layout = PackedLayout.of([2, 1, 3], CPU)
    assert layout.column.tolist() == [0, 1, 0, 0, 1, 2]
    assert layout.starts.tolist() == [0, 2, 3, 6]
    assert layout.starts.dtype == torch.int32
    assert layout.last.tolist() == [1, 2, 5]
    assert layout.longest == 3


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_groups_of_like_lengths(lengths):
    """Guards against tokens lost or taken twice, and against short sequences padded to a long one in attention."""
    layout = PackedLayout.of(lengths, CPU)
    rows = [row for row, length in enumerate(lengths) for _ in range(length)]
    columns = layout.column.tolist()
    seen = []
    for group in layout.groups:
        taken = list(zip(group.token.tolist(), group.row.tolist(), group.column.tolist(), strict=True))
        members = sorted({rows[token] for token, _, _ in taken})
        assert group.rows == len(members)
        assert group.width == max(lengths[member] for member in members)
        assert [(members[row], column) for _, row, column in taken] == [(rows[t], columns[t]) for t, _, _ in taken]
        seen += [token for token, _, _ in taken]
    assert sorted(seen) == list(range(sum(lengths)))
    padded = sum(group.rows * group.width**2 for group in layout.groups)
    assert padded <= 2.05 * sum(length**2 for length in lengths)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [SHAPES["grouped"], SHAPES["all"]], ids=["grouped", "all"])
def test_low_precision(shape, dtype):
    """Guards against an overflow in half precision, and an output of another dtype."""
    tensors = [None if tensor is None else tensor.to(dtype) for tensor in shape.tensors(sum(LENGTHS))]
    query, key, value, sinks = tensors
    layout = PackedLayout.of(LENGTHS, CPU)
    ours = ReferenceAttention().packed(query, key, value, layout, shape.traits, sinks)
    assert ours.dtype == dtype
    exact = attend_each(shape, LENGTHS, *tensors)
    torch.testing.assert_close(ours.double(), exact, rtol=0.05, atol=0.05 if dtype is torch.bfloat16 else 0.01)
