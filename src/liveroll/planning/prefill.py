"""How the contexts of one admission are split into forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from liveroll.config import PrefillRoute


@dataclass(frozen=True)
class Forward:
    """One forward over several contexts.

    Attributes:
        indices: positions of its contexts in the admission.
        width: the width they are left-padded to; None packs them without padding.
    """

    indices: tuple[int, ...]
    width: int | None


def plan_forwards(route: PrefillRoute, lengths: Sequence[int], max_tokens: int | None) -> tuple[Forward, ...]:
    """Split an admission into forwards of at most `max_tokens` token positions.

    A context that alone is longer than the limit gets a forward of its own: prompts over the limit were refused
    before, so only a request that is prefilled again over its own response can be that long.

    Args:
        route: `packed`, `equal_width` or `per_prompt`.
        lengths: tokens of each context.
        max_tokens: token positions in one forward, padding included; None for no limit.
    """
    if route == "per_prompt":
        return tuple(Forward((index,), length) for index, length in enumerate(lengths))
    limit = float("inf") if max_tokens is None else max_tokens
    if route == "equal_width":
        width = max(lengths)
        rows = len(lengths) if max_tokens is None else max(1, max_tokens // width)
        return tuple(
            Forward(tuple(range(start, min(start + rows, len(lengths)))), width)
            for start in range(0, len(lengths), rows)
        )
    return tuple(Forward(indices, None) for indices in _fill(lengths, limit))


def _fill(lengths: Sequence[int], limit: float) -> Iterator[tuple[int, ...]]:
    """Runs of consecutive contexts whose lengths add up to at most the limit."""
    group: list[int] = []
    total = 0
    for index, length in enumerate(lengths):
        if group and total + length > limit:
            yield tuple(group)
            group, total = [], 0
        group.append(index)
        total += length
    yield tuple(group)
