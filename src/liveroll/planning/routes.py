"""The routes that a call could take, what each is estimated to cost, and which one is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from liveroll.config import PrefillRoute, Route
from liveroll.planning.costs import CostModel
from liveroll.planning.estimates import PrefillTerms, decode_ms, prefill_terms
from liveroll.planning.geometry import ModelGeometry
from liveroll.planning.prefill import Forward, is_cheaper, plan_forwards, price_forwards

ROUTES: tuple[Route, ...] = get_args(Route)
PAGED_ROUTES = tuple(route for route in ROUTES if route != "ordinary")
"""Those that prefill into pages, as every admission after the first must."""


@dataclass(frozen=True)
class RouteCandidate:
    """A route that a call could take.

    Attributes:
        route: its name.
        forwards: its prefill forwards: positions of their rows among `RoutePlan.lengths`, and the width that these
            are padded to, None for packed. Rows with equal prompts are run as the first of them, but by `ordinary`.
        fixed_ms: what is estimated for launching the forwards, in ms.
        token_ms: for their token positions, padding included, in ms.
        attention_ms: for their attention, in ms.
        kv_ms: for storing keys and values in pages, in ms.
        decode_ms: for the decode steps, as far as `CostModel` counts them, in ms.
        obstacle: why `auto` may not take it, or None.
    """

    route: Route
    forwards: tuple[Forward, ...]
    fixed_ms: float
    token_ms: float
    attention_ms: float
    kv_ms: float
    decode_ms: float
    obstacle: str | None

    @property
    def cost_ms(self) -> float:
        """All of it."""
        return self.fixed_ms + self.token_ms + self.attention_ms + self.kv_ms + self.decode_ms


@dataclass(frozen=True)
class RoutePlan:
    """Which route a call takes, and why.

    Where the call has more rows than slots, costs are those of the rows that are admitted first. Each later admission
    is planned by itself, among the routes other than `ordinary`.

    Attributes:
        route: the route taken: the configured one, or with `auto` the cheapest of the candidates without an obstacle.
        configured: `RolloutConfig.prefill_route`.
        rows: rows of the call, one for each sample of each prompt.
        lengths: prompt tokens of each row admitted first.
        decode_steps: decode steps until the last of these rows reaches its budget.
        candidates: every route there is.
        costs: the coefficients, with the token limit that holds.
        geometry: the model's.
    """

    route: Route
    configured: PrefillRoute
    rows: int
    lengths: tuple[int, ...]
    decode_steps: int
    candidates: tuple[RouteCandidate, ...]
    costs: CostModel
    geometry: ModelGeometry

    @property
    def chosen(self) -> RouteCandidate:
        """The candidate of the route taken."""
        return next(candidate for candidate in self.candidates if candidate.route == self.route)


@dataclass(frozen=True)
class Room:
    """What a call may take.

    Attributes:
        slots: rows that run side by side.
        row_limits: tokens, prompt and response, that a row may hold, by what limits them.
        kv_tokens: tokens of keys and values over all rows; None where the configuration does not say.
    """

    slots: int
    row_limits: dict[str, int]
    kv_tokens: int | None


def obstacle_to_ordinary(
    lengths: Sequence[int], budgets: Sequence[int], rows: int, room: Room, max_tokens: int | None
) -> str | None:
    """Why `model.generate` may not run all rows of a call at once: it pads them, and keeps them until the last ends.

    Args:
        lengths: prompt tokens of each row.
        budgets: tokens that each may generate.
        rows: rows of the call.
        room: what the call may take.
        max_tokens: token positions in one prefill forward, or None.
    """
    if rows > room.slots:
        return f"{rows} rows do not fit {room.slots} slots"
    width, longest = max(lengths), max(lengths) + max(budgets)
    if max_tokens is not None and rows * width > max_tokens:
        return f"{rows} rows padded to {width} tokens are over the limit of {max_tokens} token positions in a forward"
    for name, limit in room.row_limits.items():
        if longest > limit:
            return f"a row padded to {width} tokens comes to hold {longest}, and {name} is {limit}"
    if room.kv_tokens is not None and rows * (longest - 1) > room.kv_tokens:
        return f"{rows} rows of up to {longest - 1} keys and values do not fit KV memory for {room.kv_tokens} tokens"
    return None


def plan_routes(
    lengths: Sequence[int],
    budgets: Sequence[int],
    *,
    runs: Sequence[int],
    rows: int,
    configured: PrefillRoute,
    allowed: Sequence[Route],
    room: Room,
    costs: CostModel,
    geometry: ModelGeometry,
) -> RoutePlan:
    """Compare the routes for a call; of those that cost the same, `auto` takes the first of `ROUTES`.

    Args:
        lengths: prompt tokens of each row admitted first.
        budgets: tokens that each of them may generate.
        runs: which of them run their prompt; the others share what one of these has run, but for `ordinary`.
        rows: rows of the call.
        configured: the route asked for, or `auto`.
        allowed: the routes that `auto` may take, at least one of them not `ordinary`.
        room: what the call may take.
        costs: the coefficients, and the limit on a forward's token positions.
        geometry: the model's.
    """
    candidates = []
    for route in ROUTES:
        forwards, terms = _forwards_of(route, lengths, runs, costs, geometry)
        obstacle = None
        if route == "ordinary":
            obstacle = obstacle_to_ordinary(lengths, budgets, rows, room, costs.max_tokens)
        candidates.append(
            RouteCandidate(
                route=route,
                forwards=forwards,
                **vars(terms),
                decode_ms=decode_ms(route, lengths, budgets, costs, geometry),
                obstacle=obstacle if route in allowed else "auto_routes leaves it out",
            )
        )
    eligible = [candidate for candidate in candidates if candidate.obstacle is None]
    cheapest = eligible[0]
    for candidate in eligible[1:]:
        cheapest = candidate if is_cheaper(candidate.cost_ms, cheapest.cost_ms) else cheapest
    return RoutePlan(
        route=cheapest.route if configured == "auto" else configured,
        configured=configured,
        rows=rows,
        lengths=tuple(lengths),
        decode_steps=max(budgets) - 1,
        candidates=tuple(candidates),
        costs=costs,
        geometry=geometry,
    )


def is_ordinary_outdone(
    rows: int, width: int, budget: int, *, allowed: Sequence[Route], costs: CostModel, geometry: ModelGeometry
) -> bool:
    """Whether another route costs no more than the ordinary one even if all rows were like the longest.

    Most calls are decided by this, without a look at single rows.

    Args:
        rows: of the call. Padded, they are within the limit of a forward.
        width: prompt tokens of the longest row.
        budget: the most tokens that a row may generate.
        allowed: the routes that `auto` may take.
        costs: the coefficients.
        geometry: the model's.
    """

    def total_ms(route: Route) -> float:
        terms = prefill_terms(route, 1, rows * width, rows * width * width, costs, geometry)
        return terms.total_ms + decode_ms(route, [width] * rows, [budget] * rows, costs, geometry)

    in_one_forward: list[Route] = [route for route in ("packed", "bucketed", "equal_width") if route in allowed]
    least = total_ms("ordinary")
    return not all(is_cheaper(least, total_ms(route)) for route in in_one_forward)


def is_ordinary_cheapest(
    lengths: Sequence[int],
    budgets: Sequence[int],
    *,
    runs: Sequence[int],
    allowed: Sequence[Route],
    costs: CostModel,
    geometry: ModelGeometry,
) -> bool:
    """Whether `auto` takes the ordinary route where nothing stands against it, as `plan_routes` would find.

    The routes whose forwards are searched for come last, since one that costs no more decides.

    Args:
        lengths: as `plan_routes` takes it.
        budgets: likewise, and so on.
        runs: likewise.
        allowed: likewise.
        costs: likewise.
        geometry: likewise.
    """

    def total_ms(route: Route) -> float:
        _, terms = _forwards_of(route, lengths, runs, costs, geometry)
        return terms.total_ms + decode_ms(route, lengths, budgets, costs, geometry)

    others = sorted((route for route in PAGED_ROUTES if route in allowed), key=lambda route: route == "bucketed")
    least = total_ms("ordinary")
    return all(is_cheaper(least, total_ms(route)) for route in others)


def _forwards_of(
    route: Route, lengths: Sequence[int], runs: Sequence[int], costs: CostModel, geometry: ModelGeometry
) -> tuple[tuple[Forward, ...], PrefillTerms]:
    """The forwards of a route over rows of these lengths, and what they are estimated to take."""
    if route == "ordinary":
        forwards: tuple[Forward, ...] = (Forward(tuple(range(len(lengths))), max(lengths)),)
        return forwards, price_forwards(route, forwards, lengths, costs, geometry)
    lengths_run = [lengths[row] for row in runs]
    planned = plan_forwards(route, lengths_run, costs, geometry)
    forwards = tuple(Forward(tuple(runs[index] for index in indices), width) for indices, width in planned)
    return forwards, price_forwards(route, planned, lengths_run, costs, geometry)
