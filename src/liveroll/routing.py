"""How the calls of an engine are routed: the costs that hold for it, and plans made with them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from liveroll.call import Call
from liveroll.config import RolloutConfig
from liveroll.errors import ConfigError, UnsupportedModelError
from liveroll.model.identity import describe_origin
from liveroll.planning.costs import CostModel
from liveroll.planning.costs_file import check_origin, read_costs
from liveroll.planning.geometry import ModelGeometry
from liveroll.planning.prefill import PrefillPlanner
from liveroll.planning.routes import (
    PAGED_ROUTES,
    Room,
    RoutePlan,
    is_ordinary_cheapest,
    is_ordinary_outdone,
    obstacle_to_ordinary,
    plan_routes,
)
from liveroll.scheduling.admission import order_of_admission


class Router:
    """Plans with the costs of one engine.

    Args:
        model: the model.
        config: the engine's.
        ranks: processes that hold shards of the model.

    Raises:
        ConfigError: the file of costs cannot be used, or was measured with something else; or costs are to be measured
            and several ranks hold the model, each of which would measure others.
    """

    def __init__(self, model: PreTrainedModel, config: RolloutConfig, ranks: int) -> None:
        self._model = model
        self._config = config
        if config.costs == "auto" and ranks > 1:
            raise ConfigError(
                'costs="auto" would be measured by each rank for itself, and ranks that hold one model must plan '
                "alike; measure them with `liveroll calibrate` and give every rank the file"
            )
        self.costs = _find_costs(model, config, ranks)
        """The coefficients, with the token limit that holds."""
        self._settled = config.costs != "auto" or config.prefill_route not in ("auto", "bucketed")

    def settle(self) -> bool:
        """Measure the costs, or find them measured, where the configuration leaves that to the first call.

        The model must not be in rollout mode yet.

        Returns:
            Whether there was something to do.
        """
        if self._settled:
            return False
        from liveroll.tools.costs_cache import find_or_measure

        # A model that the engine cannot run is refused by the call itself, which may fall back.
        with suppress(UnsupportedModelError):
            self.costs = find_or_measure(self._model, self._config)
        self._settled = True
        return True

    def plan(self, call: Call, geometry: ModelGeometry) -> RoutePlan:
        """The routes that a call could take, and the one that it takes."""
        lengths, budgets, runs = self._admitted_first(call)
        return plan_routes(
            lengths,
            budgets,
            runs=runs,
            rows=len(call.unfinished),
            configured=self._config.prefill_route,
            allowed=self._config.auto_routes,
            room=self._room(geometry),
            costs=self.costs,
            geometry=geometry,
        )

    def takes_ordinary(self, call: Call, geometry: ModelGeometry) -> bool:
        """Whether `auto` hands a call to `model.generate`."""
        lengths = [request.length for request in call.unfinished]
        budgets = [request.left for request in call.unfinished]
        room = self._room(geometry)
        if obstacle_to_ordinary(lengths, budgets, len(lengths), room, self.costs.max_tokens) is not None:
            return False
        known: dict[str, Any] = {"allowed": self._config.auto_routes, "costs": self.costs, "geometry": geometry}
        if is_ordinary_outdone(len(lengths), max(lengths), max(budgets), **known):
            return False
        lengths, budgets, runs = self._admitted_first(call)
        return is_ordinary_cheapest(lengths, budgets, runs=runs, **known)

    def _admitted_first(self, call: Call) -> tuple[list[int], list[int], list[int]]:
        """Lengths and budgets of the rows that are admitted first, and which of them run their prompts."""
        first = order_of_admission(call.unfinished)[: self._config.max_slots]
        runs: dict[int, int] = {}
        for row, request in enumerate(first):
            runs.setdefault(~row if len(request.tokens) else request.group, row)
        return [request.length for request in first], [request.left for request in first], list(runs.values())

    def planner(self, geometry: ModelGeometry) -> PrefillPlanner:
        """Plans the admissions of a call that does not go to `model.generate`."""
        route = self._config.prefill_route
        allowed = self._config.auto_routes if route == "auto" else (route,)
        return PrefillPlanner([name for name in PAGED_ROUTES if name in allowed], self.costs, geometry)

    def _room(self, geometry: ModelGeometry) -> Room:
        config = self._config
        limits = {
            "max_position_embeddings": getattr(self._model.config.get_text_config(), "max_position_embeddings", None),
            "RolloutConfig.max_length": config.max_length,
        }
        kv_tokens = config.kv_tokens
        if config.kv_bytes is not None:
            kv_tokens = config.kv_bytes // (2 * geometry.kv_width * geometry.element_bytes)
        return Room(
            slots=config.max_slots,
            row_limits={name: limit for name, limit in limits.items() if limit is not None},
            kv_tokens=kv_tokens,
        )


def _find_costs(model: PreTrainedModel, config: RolloutConfig, ranks: int) -> CostModel:
    costs = config.costs
    if costs is None or costs == "auto":
        return CostModel(max_tokens=config.prefill_max_tokens)
    if isinstance(costs, Path | str):
        path = Path(costs)
        file = read_costs(path)
        check_origin(path, file.origin, describe_origin(model, config, ranks))
        costs = file.coefficients
    limits = [limit for limit in (config.prefill_max_tokens, costs.max_tokens) if limit is not None]
    return replace(costs, max_tokens=min(limits, default=None))
