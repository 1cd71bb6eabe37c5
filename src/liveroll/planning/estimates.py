"""What prefills and decode steps are estimated to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from liveroll.config import Route
from liveroll.planning.costs import CostModel
from liveroll.planning.geometry import ModelGeometry


@dataclass(frozen=True)
class PrefillTerms:
    """The parts of what the forwards of a prefill are estimated to take, in ms."""

    fixed_ms: float
    token_ms: float
    attention_ms: float
    kv_ms: float

    @property
    def total_ms(self) -> float:
        """All of it."""
        return self.fixed_ms + self.token_ms + self.attention_ms + self.kv_ms


def padded_row_ms(widths: np.ndarray, costs: CostModel, geometry: ModelGeometry) -> np.ndarray:
    """What one row of each width adds to a padded forward, in ms."""
    widths = widths.astype(np.float64)
    linear = costs.token_ms + costs.kv_ms_per_mib * _mib(1, geometry)
    quadratic = costs.attention_ms_per_gflop * _gflops(1, geometry)
    rows: np.ndarray = linear * widths + quadratic * widths * widths
    return rows


def prefill_terms(
    route: Route, forwards: int, tokens: int, squares: int, costs: CostModel, geometry: ModelGeometry
) -> PrefillTerms:
    """What the forwards of a route are estimated to take together; the formulas are sums over forwards.

    Args:
        route: of the forwards.
        forwards: how many there are.
        tokens: token positions in them, padding included.
        squares: the squared lengths of their rows, padding included, added up.
        costs: the coefficients.
        geometry: the model's.
    """
    fixed, token, attention = _coefficients(route, costs)
    return PrefillTerms(
        fixed_ms=fixed * forwards,
        token_ms=token * tokens,
        attention_ms=attention * _gflops(squares, geometry),
        kv_ms=0.0 if route == "ordinary" else costs.kv_ms_per_mib * _mib(tokens, geometry),
    )


def decode_ms(
    route: Route, lengths: Sequence[int], budgets: Sequence[int], costs: CostModel, geometry: ModelGeometry
) -> float:
    """What decoding of rows side by side is estimated to take, in ms, no row ending before its budget.

    A prefill gives each row its first token. Rows that reach their budget leave a continuous step, while
    `model.generate` runs all of them to the end.

    Args:
        route: of the rows.
        lengths: prompt tokens of each row.
        budgets: tokens that each row may generate.
        costs: the coefficients.
        geometry: the model's.
    """
    steps = max(budgets) - 1
    if route == "ordinary":
        keys = len(budgets) * _keys_attended(max(lengths), steps)
        linear = steps * (costs.ordinary_step_ms + costs.ordinary_row_ms * len(budgets))
        return linear + costs.ordinary_kv_ms_per_mib * _mib(keys, geometry)
    keys = sum(_keys_attended(length, budget - 1) for length, budget in zip(lengths, budgets, strict=True))
    linear = steps * costs.decode_step_ms + costs.decode_row_ms * (sum(budgets) - len(budgets))
    return linear + costs.decode_kv_ms_per_mib * _mib(keys, geometry)


def _keys_attended(length: int, steps: int) -> int:
    """Keys that a row attends to over its decode steps, the first of which has one more than the prompt."""
    return steps * length + steps * (steps + 1) // 2


def _coefficients(route: Route, costs: CostModel) -> tuple[float, float, float]:
    """Ms of a forward, of a token in it, and of 10^9 operations of its attention."""
    fixed, token, attention = costs.fixed_ms, costs.token_ms, costs.attention_ms_per_gflop
    if route == "packed":
        return (
            _given(costs.packed_fixed_ms, fixed),
            _given(costs.packed_token_ms, token),
            _given(costs.packed_attention_ms_per_gflop, attention),
        )
    return _given(costs.ordinary_fixed_ms, fixed) if route == "ordinary" else fixed, token, attention


def _given(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _gflops(squares: int, geometry: ModelGeometry) -> float:
    """10^9 floating-point operations of attention over sequences whose squared lengths add up to `squares`."""
    return 4 * squares * geometry.query_width / 1e9


def _mib(tokens: int, geometry: ModelGeometry) -> float:
    """2^20 bytes of keys and values of so many tokens."""
    return 2 * tokens * geometry.kv_width * geometry.element_bytes / 2**20
