"""Timing uniform calls of an engine."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from liveroll.config import Route
from liveroll.engine import RolloutEngine
from liveroll.planning.geometry import ModelGeometry
from liveroll.sampling_config import SamplingConfig
from liveroll.tools.beside import beside
from liveroll.tools.grid import Cell, WorkloadRange
from liveroll.tools.quiet import QuietHost
from liveroll.tools.workloads import draw_prompts
from liveroll.types import RolloutStats

_SETTLED = 0.03
_AT_LEAST = 2
_GREEDY = SamplingConfig(
    max_new_tokens=1, min_new_tokens=0, temperature=0, repetition_penalty=1.0, stop_token_ids=(), logprobs=False
)


@dataclass(frozen=True)
class Sample:
    """The times of one call.

    Attributes:
        cell: the call.
        repeat: how many times it had been run before, warm-ups not counted.
        wall_ms: of the call.
        prefill_ms: of its prefill, on a GPU by the device's clock.
        decode_ms: of its decode steps and of the scheduling between them.
    """

    cell: Cell
    repeat: int
    wall_ms: float
    prefill_ms: float
    decode_ms: float

    @property
    def id(self) -> str:
        """A name that no other sample of a run has."""
        return sample_id(self.cell, self.repeat)

    @property
    def counted_ms(self) -> tuple[float, ...]:
        """The times that are read off it."""
        if self.cell.route == "ordinary":
            return self.wall_ms - self.decode_ms, self.decode_ms
        return (self.decode_ms if self.cell.steps else self.prefill_ms,)


def sample_id(cell: Cell, repeat: int) -> str:
    """Name a sample before it is taken."""
    return f"{cell.name} #{repeat}"


class Stopwatch:
    """Times cells on engines of every route that share pages and captured steps.

    Args:
        engine: profiles its calls, and has room for the largest cell.
        vocab_size: prompts are random tokens below it.
        host: waits for the calls.
    """

    def __init__(self, engine: RolloutEngine, vocab_size: int, host: QuietHost) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._host = host
        self._engines: dict[Route, RolloutEngine] = {}

    @property
    def geometry(self) -> ModelGeometry:
        """The model's, as its layers attended in what was timed."""
        timed = next(engine for route, engine in self._engines.items() if route != "ordinary")
        return timed.plan([[0]], _GREEDY).geometry

    def time(self, cell: Cell, repeat: int = 0) -> Sample:
        """Run a cell once; once more where something was captured on the way."""
        if cell.route not in self._engines:
            self._engines[cell.route] = beside(self._engine, prefill_route=cell.route)
        prompts = draw_prompts(cell.lengths, self._vocab_size, seed=repeat)
        sampling = replace(_GREEDY, max_new_tokens=cell.steps + 1)

        def generate() -> RolloutStats:
            return self._engines[cell.route].generate(prompts, sampling).stats

        stats = self._host.run(generate)
        if stats.captures or stats.prefill_captures:
            stats = self._host.run(generate)
        profile = stats.profile
        assert profile is not None
        on_device = profile.prefill_device_ms
        return Sample(
            cell=cell,
            repeat=repeat,
            wall_ms=profile.wall_ms,
            prefill_ms=profile.prefill_ms if on_device is None else on_device,
            decode_ms=profile.decode_ms + profile.scheduling_ms,
        )


def take_samples(
    stopwatch: Stopwatch,
    cells: Sequence[Cell],
    repeats: int,
    known: Mapping[str, Sample],
    keep: Callable[[Sample], None],
    seconds_left: Callable[[], float] = lambda: math.inf,
) -> list[Sample]:
    """Time every cell that is needed twice, then others twice, then all of them in turn again and again.

    No cell is left with one time: the first call of a shape loads kernels and takes memory, for up to several times as
    long as the next. Routes are timed one after the other on each shape, so that what drifts drifts for them alike.
    The first call of a kind, which captures or compiles, is not counted. From the third on a call is repeated only
    while its two shortest times are more than 3% apart.

    Args:
        stopwatch: runs them.
        cells: what to run.
        repeats: how often, at most.
        known: samples of an earlier run by their ids, which are not taken again.
        keep: called with each new sample.
        seconds_left: what may still be spent; calls that are expected to take longer are left out, but for the first
            two of each cell that is needed.

    Returns:
        The samples, known ones among them.
    """
    taken: dict[Cell, list[Sample]] = {}
    warm: set[tuple[object, ...]] = set()
    for cell, turns in _turns(cells, repeats):
        if missing := [repeat for repeat in turns if sample_id(cell, repeat) not in known]:
            again = turns[0] >= _AT_LEAST
            if again and (cell not in taken or _is_settled(taken[cell])):
                continue
            if (again or not cell.needed) and len(missing) * _expected_seconds(cell, taken) > seconds_left():
                continue
        for repeat in turns:
            sample = known.get(sample_id(cell, repeat))
            if sample is None:
                if not warm.issuperset(kinds := _kinds_of(cell)):
                    stopwatch.time(cell)
                    warm.update(kinds)
                sample = stopwatch.time(cell, repeat)
                keep(sample)
            taken.setdefault(cell, []).append(sample)
    return [sample for samples in taken.values() for sample in samples]


@dataclass(frozen=True)
class Pace:
    """How long calls are expected to take: forwards a straight line's time in their tokens.

    Attributes:
        seconds: of a call over one row that only prefills.
        width: tokens of that row.
        per_token: seconds that a token more takes.
    """

    seconds: float
    width: int
    per_token: float

    @classmethod
    def of(cls, stopwatch: Stopwatch, work: WorkloadRange) -> Pace:
        """By what the shortest and the longest row of a range take, once each has loaded its kernels."""
        low, high = (Cell("equal_width", 1, width, 0) for width in (work.min_length, work.max_length))
        for cell in (low, high):
            stopwatch.time(cell)
        first, last = (stopwatch.time(cell).wall_ms / 1e3 for cell in (low, high))
        return cls(first, low.width, max(last - first, 0.0) / max(high.width - low.width, 1))

    def seconds_of(self, cells: Iterable[Cell]) -> float:
        """How long cells take together, each decode step as long as a forward over a token of each row."""
        return sum(self._forward(cell.rows * cell.width) + cell.steps * self._forward(cell.rows) for cell in cells)

    def _forward(self, tokens: int) -> float:
        return self.seconds + self.per_token * max(tokens - self.width, 0)


def _turns(cells: Sequence[Cell], repeats: int) -> Iterator[tuple[Cell, tuple[int, ...]]]:
    """In which order cells are timed, and which of their repeats one after the other: small ones before large first."""
    rising = sorted(cells, key=lambda cell: (cell.rows * cell.width, cell.rows))
    needed = [cell for cell in rising if cell.needed]
    first = tuple(range(min(repeats, _AT_LEAST)))
    for repeat in first:
        yield from ((cell, (repeat,)) for cell in (_shuffle(needed, repeat) if repeat else needed))
    yield from ((cell, first) for cell in rising if not cell.needed)
    for repeat in range(_AT_LEAST, repeats):
        yield from ((cell, (repeat,)) for cell in _shuffle(rising, repeat))


def _shuffle(cells: Sequence[Cell], seed: int) -> list[Cell]:
    """Shapes as chance has it, and the cells of each, which stay together."""
    draw = random.Random(seed)
    shapes: defaultdict[tuple[int, int], list[Cell]] = defaultdict(list)
    for cell in draw.sample(cells, len(cells)):
        shapes[cell.rows, cell.width].append(cell)
    return [cell for shape in shapes.values() for cell in shape]


def _is_settled(samples: Sequence[Sample]) -> bool:
    """Whether the two shortest of each time that counts agree."""
    if len(samples) < 2:
        return False
    for times in zip(*(sample.counted_ms for sample in samples), strict=True):
        low, high = sorted(times)[:2]
        if high - low > _SETTLED * abs(low):
            return False
    return True


def _expected_seconds(cell: Cell, taken: Mapping[Cell, Sequence[Sample]]) -> float:
    """What a call took last, or the longest of its route where it has not been run."""
    if cell in taken:
        return taken[cell][-1].wall_ms / 1e3
    alike = (
        samples[-1].wall_ms / 1e3
        for other, samples in taken.items()
        if other.route == cell.route and bool(other.steps) == bool(cell.steps)
    )
    return max(alike, default=0.0)


def _kinds_of(cell: Cell) -> set[tuple[object, ...]]:
    """What a first call makes ready: forwards of a route, and decode steps, the engine's for each number of rows."""
    kinds: set[tuple[object, ...]] = {(cell.route,)}
    if cell.steps:
        kinds.add((cell.route, "ordinary" if cell.route == "ordinary" else cell.rows))
    return kinds
