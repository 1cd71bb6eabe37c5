"""Coefficients of costs, fitted to measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from liveroll.config import Route
from liveroll.errors import ConfigError
from liveroll.planning.costs import CostModel
from liveroll.planning.estimates import decode_ms, prefill_terms
from liveroll.planning.geometry import ModelGeometry

Kind = Literal["prefill", "decode"]

_PADDED = ("fixed_ms", "token_ms", "attention_ms_per_gflop", "kv_ms_per_mib")
_PACKED = ("packed_fixed_ms", "packed_token_ms", "packed_attention_ms_per_gflop")
_DECODE = ("decode_step_ms", "decode_row_ms", "decode_kv_ms_per_mib")
_ORDINARY = ("ordinary_step_ms", "ordinary_row_ms", "ordinary_kv_ms_per_mib")
COEFFICIENTS = (*_PADDED, *_PACKED, "ordinary_fixed_ms", *_DECODE, *_ORDINARY)
"""Those that are fitted: all of `CostModel` but its limit."""

_ZERO: dict[str, float | None] = dict.fromkeys(COEFFICIENTS, 0.0)
_CLOSE = 0.02
_ROUNDS = 25


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What rows of one length took.

    Attributes:
        kind: `prefill`, one forward over the rows, or `decode`, steps that each gave every row a token.
        route: by which route they ran.
        rows: how many.
        width: prompt tokens of each.
        steps: decode steps; 0 for a prefill.
        ms: of the forward, or of a step on average.
    """

    kind: Kind
    route: Route
    rows: int
    width: int
    steps: int
    ms: float


def predict_ms(point: Measurement, costs: CostModel, geometry: ModelGeometry) -> float:
    """What a measurement is estimated to give, by the formulas that plans are made with."""
    if point.kind == "decode":
        lengths, budgets = [point.width] * point.rows, [point.steps + 1] * point.rows
        return decode_ms(point.route, lengths, budgets, costs, geometry) / point.steps
    tokens = point.rows * point.width
    return prefill_terms(point.route, 1, tokens, tokens * point.width, costs, geometry).total_ms


def fit_costs(points: Sequence[Measurement], geometry: ModelGeometry, max_tokens: int | None) -> CostModel:
    """The coefficients, none of them negative, whose estimates are off by least.

    All measurements are fitted at once, since routes share coefficients: what `model.generate` stores in no pages
    tells storing from computing. An error counts relative to what was measured, so that small shapes, whose
    milliseconds are few, are estimated as well as large ones. Errors of more than 2% count by their size and not by its
    square (Huber 1964, doi:10.1214/aoms/1177703732), or one disturbed measurement, and the corner that no linear
    formula follows, would bend all other estimates. Lawson and Hanson's non-negative least squares,
    doi:10.1137/1.9781611971217, weighted anew in each round.

    The padded prefill of fewest tokens counts twice. On a GPU it takes as long as one of some hundred tokens, that of
    its launches, and that is what it costs to split prompts into one forward more. By fits in which the others outweigh
    it, prompts were split too often (`benchmarks/calibration_simulation.py`).

    Args:
        points: measurements, prefills and decode steps of each of packed, padded and ordinary rows.
        geometry: the model's.
        max_tokens: the limit on a forward's token positions, as the costs are to have it.

    Raises:
        ConfigError: a time is not a positive number, or nothing was measured that a coefficient counts in.
    """
    for point in points:
        if not (np.isfinite(point.ms) and point.ms > 0):
            raise ConfigError(f"a measurement must be a positive number of milliseconds: {point}")
    padded = [point for point in points if point.kind == "prefill" and point.route == "equal_width"]
    points = [*points, *sorted(padded, key=lambda point: point.rows * point.width)[:1]]
    nothing = replace(CostModel(), **_ZERO, max_tokens=max_tokens)  # type: ignore[arg-type]
    units = [replace(nothing, **{name: 1.0}) for name in COEFFICIENTS]  # type: ignore[arg-type]
    shares = np.array([[predict_ms(point, unit, geometry) / point.ms for unit in units] for point in points])
    sizes = np.abs(shares).max(axis=0) if len(points) else np.zeros(len(units))
    if not sizes.all():
        missing = [name for name, size in zip(COEFFICIENTS, sizes, strict=True) if not size]
        raise ConfigError(f"nothing was measured that {', '.join(missing)} count in")
    from scipy.optimize import nnls  # takes a third of a second to import

    # Columns of one size, so that what counts as zero is the same for all coefficients.
    columns = shares / sizes
    weights = np.ones(len(points))
    for _ in range(_ROUNDS):
        scaled, _ = nnls(columns * weights[:, None], weights)
        weights = np.sqrt(_CLOSE / np.maximum(np.abs(columns @ scaled - 1.0), _CLOSE))
    return replace(nothing, **dict(zip(COEFFICIENTS, (scaled / sizes).tolist(), strict=True)))


def errors_of(points: Sequence[Measurement], costs: CostModel, geometry: ModelGeometry) -> list[float]:
    """By what share of the measured time each estimate is off; positive where it is too high."""
    return [predict_ms(point, costs, geometry) / point.ms - 1.0 for point in points]
