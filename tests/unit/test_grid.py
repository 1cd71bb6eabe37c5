"""What calibration measures: the range declared, and no more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveroll import ConfigError
from liveroll.tools.grid import DECODE_STEPS, Cell, WorkloadRange, plan_grid


@given(st.integers(1, 64), st.integers(0, 2000), st.integers(1, 200), st.one_of(st.none(), st.integers(2100, 9000)))
def test_cells_stay_within_the_range(shortest, more, batch, limit):
    """Guards against a call that memory was not checked for, one measured twice, and a forward over the limit."""
    work = WorkloadRange(min_length=shortest, max_length=shortest + more, max_batch=batch)
    cells = plan_grid(work, limit)
    assert len({cell.name for cell in cells}) == len(cells) == len(set(cells))
    for cell in cells:
        assert 1 <= cell.rows <= batch
        assert shortest <= cell.width <= shortest + more
        assert limit is None or cell.rows * cell.width <= limit
        assert cell.width + cell.steps + 1 <= work.row_tokens


def test_the_corners_are_measured():
    """Guards against estimates beyond all that was measured."""
    cells = plan_grid(WorkloadRange(min_length=16, max_length=512, max_batch=32), 65536)
    for route, few in (("equal_width", 2), ("packed", 1)):
        for rows in (few, 32):
            for width in (16, 512):
                assert Cell(route, rows, width, 0) in cells
    for route in ("packed", "ordinary"):
        corners = {(cell.rows, cell.width) for cell in cells if cell.route == route and cell.steps == DECODE_STEPS}
        assert corners == {(1, 16), (1, 512), (32, 16), (32, 512)}
    assert len(cells) == 24


def test_padded_routes_are_timed_with_padding():
    """Guards against their costs without the mask that a ragged batch gives the model's attention.

    By costs without it, padded forwards were taken for quicker than packed ones where the host launches both.
    """
    assert Cell("ordinary", 3, 16, 4).lengths == [16, 16, 15]
    assert Cell("equal_width", 3, 16, 0).lengths == [16, 16, 15]
    assert Cell("ordinary", 1, 16, 4).lengths == [16]
    assert Cell("ordinary", 3, 1, 4).lengths == [1, 1, 1]
    assert Cell("packed", 3, 16, 0).lengths == [16, 16, 16]
    for batch, limit, fewest in ((32, None, 2), (2, None, 2), (1, None, 1), (32, 512, 1)):
        cells = plan_grid(WorkloadRange(min_length=16, max_length=512, max_batch=batch), limit)
        assert min(cell.rows for cell in cells if cell.route == "equal_width") == fewest


def test_what_is_needed():
    """Guards against a coefficient that nothing tells where time allows the needed cells only.

    And against estimates by the corners alone, which split prompts into too many forwards where launching takes long.
    """
    cells = plan_grid(WorkloadRange(min_length=16, max_length=512, max_batch=32), 65536)
    needed = [cell for cell in cells if cell.needed]
    assert cells[: len(needed)] == tuple(needed)
    corners = {(rows, width) for rows in (1, 2, 32) for width in (16, 512)}
    assert {(cell.rows, cell.width) for cell in needed} == corners | {(32, 91)}
    assert {cell.route for cell in needed if cell.width == 91} == {"equal_width", "packed"}
    assert len(needed) == 18


def test_a_range_is_halved_until_nothing_is_left():
    """Guards against a range that never gets small enough, or whose shortest prompt is longer than its longest."""
    work: WorkloadRange | None = WorkloadRange(min_length=3, max_length=7, max_batch=3)
    seen = []
    while work is not None:
        seen.append((work.max_batch, work.min_length, work.max_length))
        work = work.halved()
    assert seen == [(3, 3, 7), (2, 3, 7), (1, 3, 7), (1, 3, 4), (1, 2, 2), (1, 1, 1)]


def test_a_range_of_one_shape():
    """Guards against a logarithm of nothing, and a cell for each of equal widths."""
    cells = plan_grid(WorkloadRange(min_length=7, max_length=7, max_batch=1), None)
    assert {(cell.rows, cell.width) for cell in cells} == {(1, 7)}
    assert len(cells) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_length": 0}, "WorkloadRange.min_length must be at least 1"),
        ({"max_length": 1.5}, "WorkloadRange.max_length must be a whole number"),
        ({"max_batch": 0}, "WorkloadRange.max_batch must be at least 1"),
        ({"max_batch": 10**400}, "WorkloadRange.max_batch must be at most 1073741824"),
        ({"max_length": 10**400}, "WorkloadRange.max_length must be at most 16777216"),
        ({"min_length": 20, "max_length": 10}, "the shortest prompt, 20 tokens, is longer than the longest, 10"),
        ({"max_batches": 3}, "did you mean max_batch"),
    ],
)
def test_a_range_that_is_none_is_refused(settings, message):
    """Guards against a grid of nothing."""
    with pytest.raises(ConfigError, match=message):
        WorkloadRange(**settings)
