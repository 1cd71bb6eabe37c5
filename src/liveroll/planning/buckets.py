"""The cheapest split of prompts into padded forwards."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from liveroll.config_checks import MOST_TOKENS
from liveroll.errors import PrefillLimitError, PromptError
from liveroll.planning.costs import CostModel
from liveroll.planning.estimates import padded_row_ms
from liveroll.planning.geometry import ModelGeometry


@dataclass(frozen=True)
class Bucket:
    """Prompts that are prefilled together.

    Attributes:
        indices: their positions among the lengths given, ascending.
        width: the width they are padded to, the length of the longest.
        cost_ms: what their forward is estimated to take.
    """

    indices: tuple[int, ...]
    width: int
    cost_ms: float


def plan_buckets(lengths: Sequence[int], cost_model: CostModel, geometry: ModelGeometry) -> tuple[Bucket, ...]:
    """Split prompts into the padded forwards that together are estimated to take least.

    The split is the best one of the prompts in order of length into runs, and with costs that grow with the width
    no other split is better: prompts of two buckets that overlap in length can be exchanged at no cost.

    Takes O(n log n) time and O(n) space for n prompts.

    Args:
        lengths: tokens of each prompt.
        cost_model: coefficients, and the limit on a forward's token positions.
        geometry: the model's.

    Returns:
        The buckets, narrowest first; none for no prompts.

    Raises:
        PrefillLimitError: a prompt alone is over the limit.
        PromptError: a length is no whole number of at least 1, or over 2^24.
    """
    if not len(lengths):
        return ()
    given = _checked(lengths, cost_model.max_tokens)
    order = np.argsort(given, kind="stable")
    ordered = given[order]
    row_ms = padded_row_ms(ordered, cost_model, geometry).tolist()
    starts = _cheapest_starts(row_ms, cost_model.fixed_ms, _last_ends(ordered, cost_model.max_tokens))
    prompts, widths = order.tolist(), ordered.tolist()
    buckets: list[Bucket] = []
    end = len(widths)
    while end:
        start = starts[end]
        cost = cost_model.fixed_ms + (end - start) * row_ms[end - 1]
        buckets.append(Bucket(tuple(sorted(prompts[start:end])), widths[end - 1], cost))
        end = start
    return tuple(reversed(buckets))


def _checked(lengths: Sequence[int], limit: int | None) -> np.ndarray:
    try:
        given = np.asarray(lengths)
    except ValueError:  # lists of unlike lengths
        given = np.empty(())
    whole = given.ndim == 1 and np.issubdtype(given.dtype, np.integer)
    if not whole or given.min() < 1 or given.max() > MOST_TOKENS:
        raise PromptError(f"lengths must be whole numbers of at least 1, at most {MOST_TOKENS}, not {list(lengths)!r}")
    if limit is not None and given.max() > limit:
        index = int(np.argmax(given > limit))
        raise PrefillLimitError(
            f"prompt {index} has {given[index]} tokens and CostModel.max_tokens is {limit}; "
            "shorten it, or raise the limit (None removes it)"
        )
    return given.astype(np.int64)


def _last_ends(widths: np.ndarray, limit: int | None) -> list[int]:
    """For each start of a bucket, the last end that keeps it within the limit."""
    count = len(widths)
    if limit is None or count * int(widths[-1]) <= limit:
        return [count] * count
    ends = np.arange(1, count + 1)
    first_starts = np.maximum(ends - limit // widths, 0)  # these never fall, since widths do not
    last: list[int] = np.searchsorted(first_starts, np.arange(count), side="right").tolist()
    return last


def _cheapest_starts(row_ms: list[float], fixed_ms: float, last_end: list[int]) -> list[int]:
    """For each end, where the last bucket of the cheapest split of the prompts before it starts.

    A bucket over `[start, end)` costs `fixed_ms + (end - start) · row_ms[end - 1]`, with `row_ms` ascending. So of two
    starts the later one, once it is the better of the two, stays so for all later ends (the costs are a Monge array,
    and stay one where the limit forbids buckets). Each start is therefore the best one for one run of ends, and the
    runs are kept in a queue: Galil and Park 1992, doi:10.1016/0304-3975(92)90135-3.

    Args:
        row_ms: for each prompt in order of length, what a row of its width costs.
        fixed_ms: what a bucket costs besides.
        last_end: for each start, the last end that the limit allows.
    """
    count = len(row_ms)
    best = [0.0] * (count + 1)
    chosen = [0] * (count + 1)
    starts, begins = [0], [1]  # the queue: a start, and the first end that it is the best for
    head = 0
    for end in range(1, count + 1):
        new = end - 1
        while new:
            old, turn = starts[-1], max(begins[-1], end)
            ms = row_ms[turn - 1]
            if last_end[old] < turn or best[new] + (turn - new) * ms < best[old] + (turn - old) * ms:
                starts.pop()
                begins.pop()
                if len(starts) > head:
                    continue
                turn = end
            else:
                # The later start gains `new - old` rows of `row_ms` and has `best[new] - best[old]` to make up for.
                gain = (best[new] - best[old]) / (new - old)
                turn = min(bisect_right(row_ms, gain, turn) + 1, last_end[old] + 1)
            if turn <= count:
                starts.append(new)
                begins.append(turn)
            break
        if head + 1 < len(starts) and begins[head + 1] <= end:
            head += 1
        start = chosen[end] = starts[head]
        best[end] = best[start] + fixed_ms + (end - start) * row_ms[end - 1]
    return chosen
