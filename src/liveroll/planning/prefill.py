"""How the contexts of one admission are split into forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from liveroll.config import Route
from liveroll.planning.buckets import plan_buckets
from liveroll.planning.costs import CostModel
from liveroll.planning.estimates import PrefillTerms, padded_row_ms, prefill_terms
from liveroll.planning.geometry import ModelGeometry


class Forward(NamedTuple):
    """One forward over several contexts.

    Attributes:
        indices: positions of its contexts in the admission.
        width: the width they are left-padded to; None packs them without padding.
    """

    indices: tuple[int, ...]
    width: int | None


@dataclass(frozen=True)
class PrefillPlan:
    """The forwards of one admission, and the route that they are of."""

    route: Route
    forwards: tuple[Forward, ...]


class PrefillPlanner:
    """Plans the prefill of one admission after another.

    Args:
        routes: the routes to choose from, none of them `ordinary`; of those that cost the same the first is taken.
        costs: the coefficients, and the limit on a forward's token positions.
        geometry: the model's.
    """

    def __init__(self, routes: Sequence[Route], costs: CostModel, geometry: ModelGeometry) -> None:
        # The forwards of these two are among the splits that buckets are chosen from, at the same costs.
        surpassed = ("equal_width", "per_prompt") if "bucketed" in routes else ()
        self._routes = [route for route in routes if route not in surpassed]
        self._costs = costs
        self._geometry = geometry

    def plan(self, lengths: Sequence[int]) -> PrefillPlan:
        """The cheapest of the routes for contexts of these lengths.

        A context that alone is longer than the limit gets a forward of its own: prompts over the limit were refused
        before, so only a request that is prefilled again over its own response can be that long.
        """
        best, least = self._plan(self._routes[0], lengths), float("inf")
        if len(self._routes) > 1:
            least = self._price(best, lengths)
        for route in self._routes[1:]:
            if route == "packed" or is_cheaper(self._least_padded(lengths), least):
                plan = self._plan(route, lengths)
                if is_cheaper(price := self._price(plan, lengths), least):
                    best, least = plan, price
        return best

    def _plan(self, route: Route, lengths: Sequence[int]) -> PrefillPlan:
        return PrefillPlan(route, plan_forwards(route, lengths, self._costs, self._geometry))

    def _price(self, plan: PrefillPlan, lengths: Sequence[int]) -> float:
        return price_forwards(plan.route, plan.forwards, lengths, self._costs, self._geometry).total_ms

    def _least_padded(self, lengths: Sequence[int]) -> float:
        """What padded forwards cost at least: without padding, and no more of them than the limit asks for."""
        sizes = np.array(lengths)
        limit = self._costs.max_tokens
        forwards = 1 if limit is None else -(-int(np.minimum(sizes, limit).sum()) // limit)
        return self._costs.fixed_ms * forwards + float(padded_row_ms(sizes, self._costs, self._geometry).sum())


def is_cheaper(ms: float, other_ms: float) -> bool:
    """Whether a cost is the lower one by more than sums are rounded."""
    return ms < other_ms * (1 - 1e-9)


def plan_forwards(
    route: Route, lengths: Sequence[int], costs: CostModel, geometry: ModelGeometry
) -> tuple[Forward, ...]:
    """Split contexts into the forwards of a route, of at most `costs.max_tokens` token positions each.

    A context that alone is longer than the limit gets a forward of its own.

    Args:
        route: any but `ordinary`.
        lengths: tokens of each context.
        costs: the limit, and for buckets the coefficients.
        geometry: for buckets, the model's.
    """
    if route == "per_prompt":
        return tuple(Forward((index,), length) for index, length in enumerate(lengths))
    limit = float("inf") if costs.max_tokens is None else costs.max_tokens
    if route == "equal_width":
        groups = _fill(lengths, limit, padded=True)
        return tuple(Forward(group, max(lengths[index] for index in group)) for group in groups)
    if route == "bucketed":
        return _fill_buckets(lengths, limit, costs, geometry)
    return tuple(Forward(group, None) for group in _fill(lengths, limit, padded=False))


def price_forwards(
    route: Route, forwards: Sequence[Forward], lengths: Sequence[int], costs: CostModel, geometry: ModelGeometry
) -> PrefillTerms:
    """What forwards over contexts of these lengths are estimated to take."""
    if route == "packed":
        tokens, squares = sum(lengths), sum(length * length for length in lengths)
    else:
        shapes = [(len(forward.indices), forward.width or 0) for forward in forwards]
        tokens = sum(rows * width for rows, width in shapes)
        squares = sum(rows * width * width for rows, width in shapes)
    return prefill_terms(route, len(forwards), tokens, squares, costs, geometry)


def _fill_buckets(
    lengths: Sequence[int], limit: float, costs: CostModel, geometry: ModelGeometry
) -> tuple[Forward, ...]:
    within = [index for index, length in enumerate(lengths) if length <= limit]
    buckets = plan_buckets([lengths[index] for index in within], costs, geometry)
    forwards = [Forward(tuple(within[index] for index in bucket.indices), bucket.width) for bucket in buckets]
    alone = [Forward((index,), length) for index, length in enumerate(lengths) if length > limit]
    return (*forwards, *alone)


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
