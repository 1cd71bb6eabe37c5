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
        groups = _fill(lengths, limit, padded=True)
        return tuple(Forward(group, max(lengths[index] for index in group)) for group in groups)
    return tuple(Forward(group, None) for group in _fill(lengths, limit, padded=False))


def _fill(lengths: Sequence[int], limit: float, *, padded: bool) -> Iterator[tuple[int, ...]]:
    """Runs of consecutive contexts that take at most the limit, each padded to the longest of its run or not."""
    group: list[int] = []
    width = total = 0
    for index, length in enumerate(lengths):
        width, total = max(width, length), total + length
        if group and (width * (len(group) + 1) if padded else total) > limit:
            yield tuple(group)
            group, width, total = [], length, length
        group.append(index)
    yield tuple(group)
