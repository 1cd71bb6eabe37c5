"""Timing uniform calls of an engine, and what their times say of prefills and decode steps."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from liveroll.config import Route
from liveroll.engine import RolloutEngine
from liveroll.planning.fit import Measurement
from liveroll.planning.geometry import ModelGeometry
from liveroll.sampling_config import SamplingConfig
from liveroll.tools.beside import beside
from liveroll.tools.grid import Cell
from liveroll.tools.workloads import draw_prompts

_LEAST_SHARE = 0.05
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


def sample_id(cell: Cell, repeat: int) -> str:
    """Name a sample before it is taken."""
    return f"{cell.name} #{repeat}"


class Stopwatch:
    """Times cells on engines of every route that share pages and captured steps.

    Args:
        engine: profiles its calls, and has room for the largest cell.
        vocab_size: prompts are random tokens below it.
    """

    def __init__(self, engine: RolloutEngine, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._engines: dict[Route, RolloutEngine] = {}

    @property
    def geometry(self) -> ModelGeometry:
        """The model's, as its layers attended in what was timed."""
        timed = next(engine for route, engine in self._engines.items() if route != "ordinary")
        return timed.plan([[0]], _GREEDY).geometry

    def time(self, cell: Cell, repeat: int = 0) -> Sample:
        """Run a cell once."""
        if cell.route not in self._engines:
            self._engines[cell.route] = beside(self._engine, prefill_route=cell.route)
        prompts = draw_prompts([cell.width] * cell.rows, self._vocab_size, seed=repeat)
        sampling = replace(_GREEDY, max_new_tokens=cell.steps + 1)
        profile = self._engines[cell.route].generate(prompts, sampling).stats.profile
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
    may_repeat: Callable[[], bool] = lambda: True,
) -> list[Sample]:
    """Time every cell, all of them in turn before any is repeated, so that what drifts drifts for all alike.

    Args:
        stopwatch: runs them.
        cells: what to run.
        repeats: how often.
        known: samples of an earlier run by their ids, which are not taken again.
        keep: called with each new sample.
        may_repeat: asked before each repeat but the first; False ends it.

    Returns:
        The samples, known ones among them.
    """
    samples: list[Sample] = []
    missing = [cell for cell in cells if any(sample_id(cell, repeat) not in known for repeat in range(repeats))]
    for cell in _warm_ups(missing):
        stopwatch.time(cell)
    for repeat in range(repeats):
        if repeat and not may_repeat():
            break
        order = list(cells)
        random.Random(repeat).shuffle(order)
        for cell in order:
            sample = known.get(sample_id(cell, repeat))
            if sample is None:
                sample = stopwatch.time(cell, repeat)
                keep(sample)
            samples.append(sample)
    return samples


def read_off(samples: Sequence[Sample]) -> list[Measurement]:
    """What samples say of prefills and decode steps, by the median over repeats.

    What a call of the engine does besides its forwards is left out of all of them, since every route does it. A call
    of `model.generate` counts whole but for its decode steps and that, so that routes compare as whole calls do.
    """
    by_cell: defaultdict[Cell, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_cell[sample.cell].append(sample)
    points: list[Measurement] = []
    for cell, taken in by_cell.items():
        if cell.steps:
            points.append(cell.measured("decode", _median(sample.decode_ms for sample in taken) / cell.steps))
        if cell.route == "ordinary":
            whole = _median(sample.wall_ms - sample.decode_ms for sample in taken)
            # Noise may leave nothing of a prefill that is shorter than what surrounds it.
            prefill = max(whole - _around_forwards(by_cell, cell.rows), _LEAST_SHARE * whole)
            points.append(cell.measured("prefill", prefill))
        elif not cell.steps:
            points.append(cell.measured("prefill", _median(sample.prefill_ms for sample in taken)))
    return points


def _around_forwards(by_cell: Mapping[Cell, Sequence[Sample]], rows: int) -> float:
    """What calls of the engine with about so many rows do besides their forwards, in ms."""
    of_prefills = [cell for cell in by_cell if not cell.steps]
    nearest = min((abs(cell.rows - rows) for cell in of_prefills), default=0)
    return _median(
        sample.wall_ms - sample.prefill_ms
        for cell in of_prefills
        if abs(cell.rows - rows) == nearest
        for sample in by_cell[cell]
    )


def _warm_ups(cells: Sequence[Cell]) -> list[Cell]:
    """Cells that load every kernel and capture every step that the others need."""
    chosen: dict[Cell, None] = {}
    for route in dict.fromkeys(cell.route for cell in cells):
        for decoding in (False, True):
            alike = sorted(
                (cell for cell in cells if cell.route == route and bool(cell.steps) == decoding),
                key=lambda cell: cell.rows * cell.width,
            )
            chosen.update(dict.fromkeys([*alike[:1], *alike[-1:]]))
            if decoding and route != "ordinary":
                chosen.update(dict.fromkeys({cell.rows: cell for cell in alike}.values()))
    return list(chosen)


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0
