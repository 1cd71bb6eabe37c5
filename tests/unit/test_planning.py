"""An admission is split into forwards that hold every context once and stay within the limit."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveroll import CostModel, ModelGeometry
from liveroll.planning.prefill import Forward, plan_forwards

ROUTES = ("packed", "equal_width", "per_prompt", "bucketed")
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
GEOMETRY = ModelGeometry(layers=2, query_heads=4, kv_heads=2, head_dim=8, element_bytes=4)

steady = settings(deadline=None, derandomize=True, database=None)


def forwards_of(route: str, lengths: list[int], limit: int | None) -> tuple[Forward, ...]:
    """The forwards of a route under a limit; for buckets, with costs that take several."""
    return plan_forwards(route, lengths, CostModel(fixed_ms=2.0, max_tokens=limit), GEOMETRY)


def positions(forward: Forward, lengths: list[int]) -> int:
    """Token positions of a forward, padding included."""
    if forward.width is None:
        return sum(lengths[index] for index in forward.indices)
    return forward.width * len(forward.indices)


@pytest.mark.parametrize("route", ROUTES)
@steady
@given(lengths=LENGTHS, limit=st.none() | st.integers(1, 100))
def test_every_context_is_in_one_forward(route, lengths, limit):
    """Guards against a prompt that is prefilled twice, never, or in a row too narrow for it."""
    forwards = forwards_of(route, lengths, limit)
    order = [index for forward in forwards for index in forward.indices]
    assert (sorted(order) if route == "bucketed" else order) == list(range(len(lengths)))
    for forward in forwards:
        assert forward.indices
        assert (forward.width is None) == (route == "packed")
        assert forward.width is None or forward.width >= max(lengths[index] for index in forward.indices)


@pytest.mark.parametrize("route", ROUTES)
@steady
@given(lengths=LENGTHS, limit=st.integers(1, 100))
def test_only_a_context_over_the_limit_exceeds_it(route, lengths, limit):
    """Guards against a forward that runs out of memory, also beside a long context that is prefilled again."""
    for forward in forwards_of(route, lengths, limit):
        longest = max(lengths[index] for index in forward.indices)
        if longest > limit:
            assert len(forward.indices) == 1
            assert positions(forward, lengths) == longest
        else:
            assert positions(forward, lengths) <= limit


@pytest.mark.parametrize("route", ["packed", "equal_width"])
@steady
@given(lengths=LENGTHS, limit=st.integers(1, 100))
def test_forwards_are_full(route, lengths, limit):
    """Guards against more forwards than the limit asks for: two neighbours never fit into one."""
    forwards = forwards_of(route, lengths, limit)
    for one, other in pairwise(forwards):
        joined = one.indices + other.indices[:1]
        width = None if route == "packed" else max(lengths[index] for index in joined)
        assert positions(Forward(joined, width), lengths) > limit


@pytest.mark.parametrize("limit", [None, 10_000])
def test_one_forward_without_a_binding_limit(limit):
    """Guards against a split where none is needed, and padding to anything but the longest."""
    lengths = [3, 9, 5]
    assert forwards_of("packed", lengths, limit) == (Forward((0, 1, 2), None),)
    assert forwards_of("equal_width", lengths, limit) == (Forward((0, 1, 2), 9),)
    assert forwards_of("per_prompt", lengths, limit) == (Forward((0,), 3), Forward((1,), 9), Forward((2,), 5))


def test_a_limit_is_reached_exactly():
    """Guards against a limit taken for one token less."""
    assert forwards_of("packed", [4, 6, 5], 10) == (Forward((0, 1), None), Forward((2,), None))
    assert forwards_of("equal_width", [5, 5, 5], 10) == (Forward((0, 1), 5), Forward((2,), 5))
