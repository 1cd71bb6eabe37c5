"""What is measured to learn the costs of a declared range of work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from liveroll.config import Route
from liveroll.config_checks import check_whole, naming_unknown_options
from liveroll.errors import ConfigError
from liveroll.planning.fit import Kind, Measurement

DECODE_STEPS = 6
"""Steps that a decode measurement averages over."""

_WIDTHS = 4


@naming_unknown_options
@dataclass(frozen=True, kw_only=True)
class WorkloadRange:
    """The calls that costs are to hold for.

    Args:
        min_length: tokens of the shortest prompt.
        max_length: tokens of the longest prompt.
        max_batch: prompts that run side by side, at most.

    Raises:
        ConfigError: a number is not positive, or the range is empty.
    """

    min_length: int = 16
    max_length: int = 512
    max_batch: int = 32

    def __post_init__(self) -> None:
        check_whole(self, "min_length", low=1)
        check_whole(self, "max_length", low=1)
        check_whole(self, "max_batch", low=1)
        if self.min_length > self.max_length:
            raise ConfigError(
                f"the shortest prompt, {self.min_length} tokens, is longer than the longest, {self.max_length}"
            )

    @property
    def row_tokens(self) -> int:
        """Tokens that the longest measured row comes to hold."""
        return self.max_length + DECODE_STEPS + 1


@dataclass(frozen=True)
class Cell:
    """A uniform call that is timed.

    Attributes:
        route: how its prompts are executed; `equal_width` stands for all padded ones.
        rows: prompts.
        width: tokens of each.
        steps: decode steps; 0 where the prefill alone is of interest.
    """

    route: Route
    rows: int
    width: int
    steps: int

    @property
    def name(self) -> str:
        """A name that no other cell of a grid has."""
        kind = f"decode{self.steps}" if self.steps else "prefill"
        return f"{kind} {self.route} {self.rows}x{self.width}"

    def measured(self, kind: Kind, ms: float) -> Measurement:
        """What was measured of it: its prefill, or one of its decode steps on average."""
        steps = self.steps if kind == "decode" else 0
        return Measurement(kind=kind, route=self.route, rows=self.rows, width=self.width, steps=steps, ms=ms)


def plan_grid(work: WorkloadRange, max_tokens: int | None) -> tuple[Cell, ...]:
    """The cells to measure: one row, half of the largest batch, and all of it, of widths in equal ratios.

    On a GPU the time of a forward hardly grows until its tokens keep the device busy, which no formula linear in them
    follows. In simulations of such times, half of the batch in the middle led to the fewest wrong choices of a route.

    Padded prefills are measured over all of them, packed ones, whose rows cost no more than their tokens, over the
    fewest and the most rows. Decode steps are measured at corners and in the middle, of the engine and of
    `model.generate`; the latter's calls show what its prefill takes as well.

    Args:
        work: the range.
        max_tokens: token positions in one forward; wider cells get fewer rows.
    """
    cells: dict[Cell, None] = {}

    def add(route: Route, rows: int, width: int, steps: int) -> None:
        most = rows if max_tokens is None else min(rows, max(max_tokens // width, 1))
        cells[Cell(route, most, width, steps)] = None

    all_rows = sorted({1, -(-work.max_batch // 2), work.max_batch})
    widths = list(_spread(work.min_length, work.max_length, _WIDTHS))
    for width in widths:
        for rows in all_rows:
            add("equal_width", rows, width, 0)
        for rows in dict.fromkeys((all_rows[0], all_rows[-1])):
            add("packed", rows, width, 0)
    middle = all_rows[len(all_rows) // 2], widths[len(widths) // 2]
    for rows, width in ((all_rows[0], widths[0]), (all_rows[-1], widths[0]), middle, (all_rows[-1], widths[-1])):
        add("packed", rows, width, DECODE_STEPS)
        add("ordinary", rows, width, DECODE_STEPS)
    return tuple(cells)


def _spread(low: int, high: int, count: int) -> Iterator[int]:
    """Ascending whole numbers from low to high in equal ratios, each once."""
    last = 0
    for index in range(count):
        value = round(low * math.exp(math.log(high / low) * index / (count - 1)))
        if value > last:
            yield value
            last = value
