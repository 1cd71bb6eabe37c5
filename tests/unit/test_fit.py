"""Coefficients fitted to measurements: right ones from exact times, sensible ones from others."""

from __future__ import annotations

import dataclasses
import random

import pytest

from liveroll import ConfigError, CostModel, ModelGeometry
from liveroll.planning.fit import COEFFICIENTS, Measurement, errors_of, fit_costs, predict_ms
from liveroll.tools.grid import WorkloadRange, plan_grid

GEOMETRY = ModelGeometry(layers=4, query_heads=8, kv_heads=2, head_dim=64, element_bytes=2)
TRUE = CostModel(
    fixed_ms=20.0,
    token_ms=0.02,
    attention_ms_per_gflop=0.5,
    kv_ms_per_mib=0.3,
    packed_fixed_ms=22.0,
    packed_token_ms=0.015,
    packed_attention_ms_per_gflop=0.2,
    ordinary_fixed_ms=25.0,
    decode_step_ms=6.0,
    decode_row_ms=0.05,
    decode_kv_ms_per_mib=0.1,
    ordinary_step_ms=30.0,
    ordinary_row_ms=0.02,
    ordinary_kv_ms_per_mib=0.4,
    max_tokens=4096,
)
CELLS = plan_grid(WorkloadRange(min_length=16, max_length=512, max_batch=32), None)


def points_of(times):
    """Every measurement of the grid, by a function that says what one takes."""
    points = []
    for cell in CELLS:
        kinds = (["decode"] if cell.steps else []) + (["prefill"] if cell.route == "ordinary" or not cell.steps else [])
        for kind in kinds:
            point = cell.measured(kind, 1.0)
            points.append(dataclasses.replace(point, ms=times(point)))
    return points


def exact(point: Measurement) -> float:
    return predict_ms(point, TRUE, GEOMETRY)


def test_all_coefficients_are_fitted():
    """Guards against a coefficient of the formula that calibration forgets."""
    assert {field.name for field in dataclasses.fields(CostModel)} == {*COEFFICIENTS, "max_tokens"}


def test_exact_times_give_the_coefficients_back():
    """Guards against a term that the fit counts otherwise than the plans, and against routes mixed up."""
    fitted = fit_costs(points_of(exact), GEOMETRY, 4096)
    for name in COEFFICIENTS:
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert fitted.max_tokens == 4096


def test_noise_moves_estimates_no_further_than_itself():
    """Guards against a fit that follows the noise of one point."""
    noise = random.Random(1)
    fitted = fit_costs(points_of(lambda point: exact(point) * noise.uniform(0.96, 1.04)), GEOMETRY, None)
    assert max(abs(error) for error in errors_of(points_of(exact), fitted, GEOMETRY)) < 0.05
    assert all(getattr(fitted, name) >= 0 for name in COEFFICIENTS)


def test_one_disturbed_prefill_moves_little():
    """Guards against squared errors, by which one call that something else delayed bends all other estimates."""
    points = points_of(exact)
    for place, point in enumerate(points):
        if point.kind == "prefill":
            disturbed = [*points[:place], dataclasses.replace(point, ms=1.5 * point.ms), *points[place + 1 :]]
            errors = errors_of(points, fit_costs(disturbed, GEOMETRY, None), GEOMETRY)
            assert sum(map(abs, errors)) / len(errors) < 0.005, point


def test_small_shapes_count_as_much_as_large_ones():
    """Guards against a fit of absolute errors, in which what a second is off by hides all of a short prefill."""

    def uneven(point: Measurement) -> float:
        return exact(point) * (0.8 if point.rows * point.width > 4000 else 1.0)

    fitted = fit_costs(points_of(uneven), GEOMETRY, None)
    small = [point for point in points_of(exact) if point.kind == "prefill" and point.rows * point.width <= 600]
    assert max(abs(error) for error in errors_of(small, fitted, GEOMETRY)) < 0.08


def test_a_forward_more_costs_what_a_launch_takes():
    """Guards against prompts split into forwards that each take as long to launch as all prompts do in one."""

    def launched(point: Measurement) -> float:
        work = 4.5 + 0.026 * point.rows * point.width
        return max(30.0, work) if point.kind == "prefill" else exact(point)

    fitted = fit_costs(points_of(launched), GEOMETRY, None)
    assert fitted.fixed_ms == pytest.approx(30.0, rel=0.07)


def test_no_coefficient_is_negative():
    """Guards against costs that CostModel refuses, from times that fall where more is done."""
    fitted = fit_costs(points_of(lambda point: 100.0 / (point.rows * point.width)), GEOMETRY, None)
    assert all(getattr(fitted, name) >= 0 for name in COEFFICIENTS)


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_is_positive(ms):
    """Guards against a clock that stood still, which would count without bound."""
    points = points_of(exact)
    with pytest.raises(ConfigError, match="positive number of milliseconds"):
        fit_costs([*points, dataclasses.replace(points[0], ms=ms)], GEOMETRY, None)


def test_what_was_not_measured_is_named():
    """Guards against coefficients of 0, and so a route for nothing, where nothing was measured."""
    points = [point for point in points_of(exact) if point.kind == "prefill"]
    with pytest.raises(ConfigError, match="nothing was measured that decode_step_ms, decode_row_ms"):
        fit_costs(points, GEOMETRY, None)
    with pytest.raises(ConfigError, match="fixed_ms"):
        fit_costs([], GEOMETRY, None)
