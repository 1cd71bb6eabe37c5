"""Samples of timed calls, and what is read off them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import zoo

from liveroll import RolloutConfig, RolloutEngine
from liveroll.tools.grid import Cell, WorkloadRange
from liveroll.tools.measure import Pace, Sample, Stopwatch, sample_id, take_samples
from liveroll.tools.quiet import QuietHost
from liveroll.tools.readings import read_off

PADDED, PACKED = Cell("equal_width", 4, 8, 0), Cell("packed", 4, 8, 0)
DECODE, ORDINARY = Cell("packed", 4, 8, 5), Cell("ordinary", 4, 8, 5)
CELLS = (PADDED, PACKED, DECODE, ORDINARY)


class Watch:
    """Notes what it is asked to time."""

    def __init__(self, fail_at: int | None = None, noise: float = 0.0) -> None:
        self.timed: list[tuple[Cell, int]] = []
        self.fail_at = fail_at
        self.noise = noise

    def time(self, cell: Cell, repeat: int = 0) -> Sample:
        if len(self.timed) == self.fail_at:
            raise KeyboardInterrupt
        self.timed.append((cell, repeat))
        slower = 1.0 + self.noise * repeat
        return Sample(cell, repeat, 10.0 * slower, 5.0 * slower, 2.0 * slower)

    @property
    def counted(self) -> list[tuple[Cell, int]]:
        """What was timed, without the first calls of a kind, which are followed by the same call again."""
        after = [*self.timed[1:], (None, 0)]
        return [call for call, following in zip(self.timed, after, strict=True) if call != following]


def test_what_is_read_off():
    """Guards against times of the wrong part of a call, a decode step for all of them, and prefills of decode calls."""
    samples = [
        *(Sample(PADDED, repeat, 13.0, ms, 0.5) for repeat, ms in enumerate((9.0, 50.0, 10.0))),
        Sample(PACKED, 0, 12.0, 8.0, 0.5),
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
    # Half a millisecond of scheduling is in calls without a step, too; `model.generate` has none.
    assert points["decode", "packed"].ms == pytest.approx((30.0 - 0.5) / 5)
    assert points["decode", "ordinary"].ms == 45.0 / 5
    # Of the calls that prefill alone, the median spends 3 ms around the forward: 4, -37, 3 and 4.
    assert points["prefill", "ordinary"].ms == pytest.approx(60.0 - 45.0 - 3.0)
    assert {(point.rows, point.width) for point in points.values()} == {(4, 8)}
    assert [point.steps for point in points.values() if point.kind == "decode"] == [5, 5]


def test_the_shorter_of_two_times_counts():
    """Guards against what a first call of a shape loads, counted by half where each is timed twice."""
    samples = [Sample(PADDED, repeat, 13.0, ms, 0.5) for repeat, ms in enumerate((90.0, 10.0))]
    assert [point.ms for point in read_off(samples)] == [10.0]


def test_a_prefill_is_never_nothing():
    """Guards against a time of 0 or less, which cannot be fitted, where what surrounds a prefill is noisy."""
    samples = [Sample(PADDED, 0, 30.0, 2.0, 0.0), Sample(ORDINARY, 0, 30.0, 1.0, 20.0)]
    assert all(point.ms > 0 for point in read_off(samples))


def test_repeats_are_interleaved_and_in_other_orders():
    """Guards against a device that slows down, and makes the cells measured last the dear ones."""
    watch = Watch(noise=0.1)
    samples = take_samples(watch, CELLS, 4, {}, lambda sample: None)
    assert [repeat for _, repeat in watch.counted] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    rounds = [[cell for cell, _ in watch.counted][start : start + 4] for start in range(0, 16, 4)]
    assert all(set(order) == set(CELLS) for order in rounds)
    assert len(set(map(tuple, rounds))) > 1
    assert {sample.id for sample in samples} == {sample_id(cell, repeat) for cell, repeat in watch.counted}


def test_times_that_agree_are_not_taken_again():
    """Guards against seconds spent on what two calls have told, and against noise that two calls are left with."""
    assert len(take_samples(Watch(noise=0.02), CELLS, 5, {}, lambda sample: None)) == 2 * len(CELLS)
    assert len(take_samples(Watch(noise=0.04), CELLS, 5, {}, lambda sample: None)) == 5 * len(CELLS)
    assert len(take_samples(Watch(), CELLS, 1, {}, lambda sample: None)) == len(CELLS)


def test_first_calls_of_a_kind_are_not_counted():
    """Guards against the time of a capture counted to the first call that needs it, and against warming up again."""
    cells = [PADDED, Cell("equal_width", 9, 9, 0), *(Cell("packed", rows, 8, 5) for rows in (1, 2, 3))]
    watch = Watch()
    take_samples(watch, cells, 2, {}, lambda sample: None)
    assert len(watch.timed) - len(watch.counted) == 4
    warmed = [call for call, after in zip(watch.timed, watch.timed[1:], strict=False) if call == after]
    assert {cell for cell, _ in warmed} == {PADDED, *cells[2:]}


def test_what_is_known_is_not_timed_again():
    """Guards against a resumed run that begins anew, or that leaves samples out."""
    kept: list[Sample] = []
    first = Watch(fail_at=10)
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


def test_time_that_runs_out():
    """Guards against a first call of an engine that waits for as long as a slow device takes.

    And against costs by first calls of a shape, which load kernels: they led to a route 1.6 times as slow as the best.
    """
    optional = Cell("equal_width", 2, 8, 0, needed=False)
    spent = take_samples(Watch(noise=0.1), [optional, *CELLS], 3, {}, lambda sample: None, seconds_left=lambda: -1.0)
    assert sorted(sample.repeat for sample in spent) == [0] * 4 + [1] * 4
    assert {sample.cell for sample in spent} == set(CELLS)
    left = iter([1.0, 1.0, -1.0])
    some = take_samples(Watch(noise=0.1), CELLS, 5, {}, lambda sample: None, seconds_left=lambda: next(left, -1.0))
    assert sorted(sample.repeat for sample in some) == [0] * 4 + [1] * 4 + [2] * 2


def test_what_is_not_needed_is_timed_twice_or_not_at_all():
    """Guards against a point that is the first call of its shape alone, and bends estimates that were good without."""
    optional = replace(PADDED, rows=2, needed=False)
    for left, repeats, expected in ((0.02, 2, []), (0.025, 2, [0, 1]), (0.015, 1, [0]), (0.02, 4, [])):
        watch = Watch(noise=0.1)  # the second call of a cell takes 11 ms
        samples = take_samples(watch, [PADDED, optional], repeats, {}, lambda sample: None, lambda left=left: left)
        assert [sample.repeat for sample in samples if sample.cell == optional] == expected


def test_routes_are_timed_side_by_side():
    """Guards against routes compared by times of which one is of a busy host and the other of an idle one."""
    cells = [replace(cell, rows=rows) for cell in CELLS for rows in (1, 2, 3)]
    watch = Watch(noise=0.1)
    take_samples(watch, cells, 4, {}, lambda sample: None)
    for repeat in range(4):
        rows = [cell.rows for cell, place in watch.counted if place == repeat]
        assert [rows[start : start + 4] for start in (0, 4, 8)] == [[row] * 4 for row in rows[::4]]


def test_a_slow_device_is_foreseen():
    """Guards against a range that is begun, and takes minutes, where seconds are allowed."""
    pace = Pace(seconds=0.1, width=10, per_token=0.01)
    assert pace.seconds_of([Cell("packed", 1, 10, 0)]) == pytest.approx(0.1)
    assert pace.seconds_of([Cell("packed", 3, 10, 0)]) == pytest.approx(0.3)
    assert pace.seconds_of([Cell("packed", 3, 10, 2), Cell("ordinary", 20, 1, 1)]) == pytest.approx(0.3 + 0.2 + 0.4)


class Rising:
    """Takes a second for each token."""

    def __init__(self) -> None:
        self.timed: list[int] = []

    def time(self, cell: Cell, repeat: int = 0) -> Sample:
        self.timed.append(cell.width)
        return Sample(cell, repeat, 1e3 * cell.rows * cell.width, 1.0, 0.0)


def test_the_pace_is_that_of_two_rows():
    """Guards against a pace that counts what the first call of a width loads, or one of a range of a single width."""
    watch = Rising()
    assert Pace.of(watch, WorkloadRange(min_length=4, max_length=10, max_batch=3)) == Pace(4.0, 4, 1.0)
    assert watch.timed == [4, 10, 4, 10]
    assert Pace.of(watch, WorkloadRange(min_length=4, max_length=4, max_batch=3)) == Pace(4.0, 4, 0.0)


def test_a_call_that_captures_is_run_again():
    """Guards against the seconds of a capture in the time of a call."""
    engine = RolloutEngine(zoo.build("llama"), config=RolloutConfig(max_slots=4, max_length=32, profile=True))
    watch = Stopwatch(engine, zoo.VOCAB_SIZE, QuietHost(0.0))
    for rows, captures in ((2, 1), (2, 1), (4, 2)):
        before = engine.replays
        watch.time(Cell("packed", rows, 4, 3))
        assert engine.captures == captures
        assert engine.replays - before == (6 if before == 0 or rows == 4 else 3)


def test_a_call_that_captures_its_prefill_is_run_again():
    """Guards against the seconds of a capture in the time of a prefill."""
    config = RolloutConfig(max_slots=2, max_length=200, profile=True, prefill_capture=True)
    engine = RolloutEngine(zoo.build("llama"), config=config)
    watch = Stopwatch(engine, zoo.VOCAB_SIZE, QuietHost(0.0))
    for width, captures, replays in ((4, 1, 2), (4, 1, 3), (100, 2, 5)):
        watch.time(Cell("packed", 1, width, 0))
        assert (engine.prefill_captures, engine.prefill_replays) == (captures, replays)
