"""What the times of uniform calls say of prefills and decode steps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from liveroll.planning.fit import Measurement
from liveroll.tools.grid import Cell
from liveroll.tools.measure import Sample

# Noise may leave nothing of what is shorter than that which surrounds it.
_LEAST_SHARE = 0.05


def read_off(samples: Sequence[Sample]) -> list[Measurement]:
    """What samples say of prefills and decode steps, by the median over repeats, the lower one of two.

    What a call of the engine does besides its forwards is left out of all of them, since every route does it. A call
    of `model.generate` counts whole but for its decode steps and that, so that routes compare as whole calls do.
    """
    by_cell: defaultdict[Cell, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_cell[sample.cell].append(sample)
    points: list[Measurement] = []
    for cell, taken in by_cell.items():
        if cell.steps:
            whole = _median(sample.decode_ms for sample in taken)
            around = 0.0 if cell.route == "ordinary" else _beside_prefills(by_cell, cell.rows, _scheduling_ms)
            points.append(cell.measured("decode", max(whole - around, _LEAST_SHARE * whole) / cell.steps))
        if cell.route == "ordinary":
            whole = _median(sample.wall_ms - sample.decode_ms for sample in taken)
            prefill = max(whole - _beside_prefills(by_cell, cell.rows, _surrounding_ms), _LEAST_SHARE * whole)
            points.append(cell.measured("prefill", prefill))
        elif not cell.steps:
            points.append(cell.measured("prefill", _median(sample.prefill_ms for sample in taken)))
    return points


def _beside_prefills(by_cell: Mapping[Cell, Sequence[Sample]], rows: int, read: Callable[[Sample], float]) -> float:
    """The median of what calls of the engine show that prefill about so many rows and do nothing else, in ms."""
    of_prefills = [cell for cell in by_cell if not cell.steps]
    nearest = min((abs(cell.rows - rows) for cell in of_prefills), default=0)
    return _median(read(sample) for cell in of_prefills if abs(cell.rows - rows) == nearest for sample in by_cell[cell])


def _surrounding_ms(sample: Sample) -> float:
    """What a call that only prefills does besides its forward."""
    return sample.wall_ms - sample.prefill_ms


def _scheduling_ms(sample: Sample) -> float:
    """What of that counts as scheduling."""
    return sample.decode_ms


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median_low(found) if found else 0.0
