"""Samples of timed calls, and what is read off them."""

from __future__ import annotations

import pytest

from liveroll.tools.grid import Cell
from liveroll.tools.measure import Sample, read_off, sample_id, take_samples

PADDED, PACKED = Cell("equal_width", 4, 8, 0), Cell("packed", 4, 8, 0)
DECODE, ORDINARY = Cell("packed", 4, 8, 5), Cell("ordinary", 4, 8, 5)
CELLS = (PADDED, PACKED, DECODE, ORDINARY)


class Watch:
    """Notes what it is asked to time."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.timed: list[tuple[Cell, int]] = []
        self.fail_at = fail_at

    def time(self, cell: Cell, repeat: int = 0) -> Sample:
        if len(self.timed) == self.fail_at:
            raise KeyboardInterrupt
        self.timed.append((cell, repeat))
        return Sample(cell, repeat, 10.0 + repeat, 5.0, 2.0)


def test_what_is_read_off():
    """Guards against times of the wrong part of a call, a decode step for all of them, and prefills of decode calls."""
    samples = [
        *(Sample(PADDED, repeat, 13.0, ms, 0.1) for repeat, ms in enumerate((9.0, 50.0, 10.0))),
        Sample(PACKED, 0, 12.0, 8.0, 0.1),
        Sample(DECODE, 0, 40.0, 7.0, 30.0),
        Sample(ORDINARY, 0, 60.0, 11.0, 45.0),
    ]
    points = {(point.kind, point.route): point for point in read_off(samples)}
    assert points.keys() == {
        ("prefill", "equal_width"),
        ("prefill", "packed"),
        ("decode", "packed"),
        ("prefill", "ordinary"),
        ("decode", "ordinary"),
    }
    assert points["prefill", "equal_width"].ms == 10.0
    assert points["decode", "packed"].ms == 30.0 / 5
    assert points["decode", "ordinary"].ms == 45.0 / 5
    # Of the calls that prefill alone, the median spends 3.5 ms around the forward: 4, -37, 3 and 4.
    assert points["prefill", "ordinary"].ms == pytest.approx(60.0 - 45.0 - 3.5)
    assert {(point.rows, point.width) for point in points.values()} == {(4, 8)}
    assert [point.steps for point in points.values() if point.kind == "decode"] == [5, 5]


def test_a_prefill_is_never_nothing():
    """Guards against a time of 0 or less, which cannot be fitted, where what surrounds a prefill is noisy."""
    samples = [Sample(PADDED, 0, 30.0, 2.0, 0.0), Sample(ORDINARY, 0, 30.0, 1.0, 20.0)]
    assert all(point.ms > 0 for point in read_off(samples))


def test_repeats_are_interleaved_and_in_other_orders():
    """Guards against a device that slows down, and makes the cells measured last the dear ones."""
    watch = Watch()
    samples = take_samples(watch, CELLS, 3, {}, lambda sample: None)
    repeats = [repeat for _, repeat in watch.timed[-12:]]
    assert repeats == [0] * 4 + [1] * 4 + [2] * 4
    rounds = [[cell for cell, _ in watch.timed[-12:]][start : start + 4] for start in (0, 4, 8)]
    assert all(set(order) == set(CELLS) for order in rounds)
    assert rounds[0] != rounds[1] or rounds[1] != rounds[2]
    assert [sample.id for sample in samples] == [sample_id(cell, repeat) for cell, repeat in watch.timed[-12:]]
    warmed = [cell for cell, _ in watch.timed[:-12]]
    assert {cell.route for cell in warmed} == {cell.route for cell in CELLS}
    assert DECODE in warmed


def test_every_batch_size_is_warmed_up():
    """Guards against the time of a capture counted to the first call that needs it."""
    cells = [Cell("packed", rows, 8, 5) for rows in (1, 2, 3, 4)]
    watch = Watch()
    take_samples(watch, cells, 1, {}, lambda sample: None)
    assert {cell.rows for cell, _ in watch.timed[:-4]} == {1, 2, 3, 4}


def test_what_is_known_is_not_timed_again():
    """Guards against a resumed run that begins anew, or that leaves samples out."""
    kept: list[Sample] = []
    first = Watch(fail_at=9)
    with pytest.raises(KeyboardInterrupt):
        take_samples(first, CELLS, 2, {}, kept.append)
    assert 0 < len(kept) < 8
    second = Watch()
    more: list[Sample] = []
    samples = take_samples(second, CELLS, 2, {sample.id: sample for sample in kept}, more.append)
    assert len(samples) == 8
    assert {sample.id for sample in kept} | {sample.id for sample in more} == {sample.id for sample in samples}
    assert len(kept) + len(more) == 8
    nothing = Watch()
    assert len(take_samples(nothing, CELLS, 2, {sample.id: sample for sample in samples}, more.append)) == 8
    assert nothing.timed == []


def test_time_that_runs_out_ends_the_repeats():
    """Guards against a first call of an engine that waits for as long as a slow device takes, or measures nothing."""
    samples = take_samples(Watch(), CELLS, 3, {}, lambda sample: None, may_repeat=lambda: False)
    assert [sample.repeat for sample in samples] == [0] * 4
