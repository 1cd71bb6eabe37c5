"""What is measured to learn the costs of a declared range of work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from liveroll.config import Route
from liveroll.config_checks import MOST_TOKENS, check_whole, naming_unknown_options
from liveroll.errors import ConfigError
from liveroll.planning.fit import Kind, Measurement

DECODE_STEPS = 4
"""Steps that a decode measurement averages over."""

# No memory holds more rows; their bytes are still a number that can be shown.
_MOST_ROWS = 1 << 30

_WIDTHS = 3
_PREFILLS: tuple[Route, ...] = ("equal_width", "packed")
_DECODES: tuple[Route, ...] = ("packed", "ordinary")


@naming_unknown_options
@dataclass(frozen=True, kw_only=True)
class WorkloadRange:
    """The calls that costs are to hold for.

    Args:
        min_length: tokens of the shortest prompt.
        max_length: tokens of the longest prompt; up to 2^24.
        max_batch: prompts that run side by side, at most; up to 2^30.

    Raises:
        ConfigError: a number is not positive or too large, or the range is empty.
    """

    min_length: int = 16
    max_length: int = 512
    max_batch: int = 32

    def __post_init__(self) -> None:
        check_whole(self, "min_length", low=1, high=MOST_TOKENS)
        check_whole(self, "max_length", low=1, high=MOST_TOKENS)
        check_whole(self, "max_batch", low=1, high=_MOST_ROWS)
        if self.min_length > self.max_length:
            raise ConfigError(
                f"the shortest prompt, {self.min_length} tokens, is longer than the longest, {self.max_length}"
            )

    @property
    def row_tokens(self) -> int:
        """Tokens that the longest measured row comes to hold."""
        return self.max_length + DECODE_STEPS + 1

    def halved(self) -> WorkloadRange | None:
        """A smaller range: half as many prompts, or where there is one, half as long; None where both are 1."""
        if self.max_batch > 1:
            return replace(self, max_batch=-(-self.max_batch // 2))
        if self.max_length > 1:
            length = -(-self.max_length // 2)
            return replace(self, min_length=min(self.min_length, length), max_length=length)
        return None


@dataclass(frozen=True)
class Cell:
    """A call that is timed.

    Attributes:
        route: how its prompts are executed; `equal_width` stands for all padded ones.
        rows: prompts.
        width: tokens of each, but for the last one where `lengths` says so.
        steps: decode steps; 0 where the prefill alone is of interest.
        needed: whether some coefficient is unknown without it.
    """

    route: Route
    rows: int
    width: int
    steps: int
    needed: bool = field(default=True, compare=False)

    @property
    def name(self) -> str:
        """A name that no other cell of a grid has."""
        kind = f"decode{self.steps}" if self.steps else "prefill"
        return f"{kind} {self.route} {self.rows}x{self.width}"

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt.

        But for packed ones the last is a token shorter: as soon as there is padding, as there is in almost every
        batch of prompts, the model's own attention is given a mask, and takes a slower way.
        """
        shorter = self.route != "packed" and self.rows > 1 and self.width > 1
        return [self.width] * (self.rows - 1) + [self.width - shorter]

    def measured(self, kind: Kind, ms: float) -> Measurement:
        """What was measured of it: its prefill, or one of its decode steps on average."""
        steps = self.steps if kind == "decode" else 0
        return Measurement(kind=kind, route=self.route, rows=self.rows, width=self.width, steps=steps, ms=ms)


def plan_grid(work: WorkloadRange, max_tokens: int | None) -> tuple[Cell, ...]:
    """The cells to measure, those first that are needed: the corners of the range, and a prefill between them.

    At the corners padded and packed prefills are measured, and decode steps of the engine and of `model.generate`; the
    latter's calls show what its prefill takes as well. On a GPU the time of a forward hardly grows until its tokens
    keep the device busy, which no formula linear in them follows. What lies between the corners says where that is: by
    the corners alone, prompts are split into more forwards than pay (`benchmarks/calibration_simulation.py`). So all
    rows of a middle width are needed, and other prefills are measured besides.

    Args:
        work: the range.
        max_tokens: token positions in one forward; wider cells get fewer rows.
    """
    cells: dict[Cell, None] = {}

    def add(route: Route, rows: int, width: int, steps: int, *, needed: bool) -> None:
        if route == "equal_width" and rows == 1:
            rows = min(2, work.max_batch)  # a single row has no padding
        most = rows if max_tokens is None else min(rows, max(max_tokens // width, 1))
        cells.setdefault(Cell(route, most, width, steps, needed))

    widths = list(_spread(work.min_length, work.max_length, _WIDTHS))
    narrow, middle, wide = widths[0], widths[len(widths) // 2], widths[-1]
    few, half, all_rows = 1, -(-work.max_batch // 2), work.max_batch
    for rows in (few, all_rows):
        for width in (narrow, wide):
            for route in _PREFILLS:
                add(route, rows, width, 0, needed=True)
            for route in _DECODES:
                add(route, rows, width, DECODE_STEPS, needed=True)
    for rows, width in ((all_rows, middle), (few, middle), (half, middle), (half, wide)):
        for route in _PREFILLS:
            add(route, rows, width, 0, needed=rows == all_rows)
    return tuple(cells)


def _spread(low: int, high: int, count: int) -> Iterator[int]:
    """Ascending whole numbers from low to high in equal ratios, each once."""
    last = 0
    for index in range(count):
        value = round(low * math.exp(math.log(high / low) * index / (count - 1)))
        if value > last:
            yield value
            last = value
