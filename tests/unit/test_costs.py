"""Coefficients and shapes that costs are estimated from."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from liveroll import ConfigError, CostModel, ModelGeometry

NAN, INF = float("nan"), float("inf")
GEOMETRY = {"layers": 4, "query_heads": 8, "kv_heads": 2, "head_dim": 64, "element_bytes": 2}
NAMES = [field.name for field in dataclasses.fields(CostModel)]
COEFFICIENTS = [name for name in NAMES if name != "max_tokens"]
REQUIRED = [name for name in COEFFICIENTS if getattr(CostModel(), name) is not None]


@pytest.mark.parametrize("value", [-1, -1e-9, NAN, INF, -INF, 1.01e9, 1e308, 10**400, True, "1", [1.0]], ids=str)
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_a_coefficient_is_finite_and_not_negative(name, value):
    """Guards against a plan made with NaN, with which no comparison holds, or with a negative or infinite cost."""
    with pytest.raises(ConfigError, match=rf"CostModel\.{name} must be"):
        CostModel(**{name: value})


@pytest.mark.parametrize("name", REQUIRED)
def test_a_coefficient_without_a_stand_in_must_be_given(name):
    """Guards against None in a sum."""
    with pytest.raises(ConfigError, match=rf"CostModel\.{name} must be a number"):
        CostModel(**{name: None})


@pytest.mark.parametrize("value", [0, -1, 1.5, NAN, True, "64"], ids=repr)
def test_the_token_limit_is_a_whole_number(value):
    """Guards against a limit that nothing, or everything, is within."""
    with pytest.raises(ConfigError, match=r"CostModel\.max_tokens must be"):
        CostModel(max_tokens=value)


def test_the_defaults():
    """Guards against other defaults than those documented."""
    costs = CostModel()
    assert (costs.fixed_ms, costs.token_ms, costs.attention_ms_per_gflop, costs.kv_ms_per_mib) == (25, 0.1, 0.01, 0.04)
    assert (costs.decode_step_ms, costs.max_tokens) == (10, 65536)
    assert costs.ordinary_step_ms == costs.ordinary_row_ms == costs.decode_row_ms == 0
    assert CostModel(max_tokens=None).max_tokens is None


def test_an_unknown_coefficient_is_answered_with_the_nearest():
    """Guards against a misspelt coefficient that is lost."""
    with pytest.raises(ConfigError, match="CostModel has no option token_cost_ms; did you mean token_ms"):
        CostModel(token_cost_ms=1)


def test_cost_models_are_values():
    """Guards against models that cannot be compared, hashed or sent to another process."""
    costs = CostModel(token_ms=np.float32(0.5), max_tokens=np.int64(7))
    twin = pickle.loads(pickle.dumps(costs))
    assert costs == twin == CostModel(token_ms=0.5, max_tokens=7)
    assert hash(costs) == hash(twin)
    with pytest.raises(dataclasses.FrozenInstanceError):
        costs.token_ms = 1.0


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", None, NAN, (8,) * 3, (8, 8, 8, 0), (8, 8, 8, True)], ids=repr)
@pytest.mark.parametrize("name", GEOMETRY)
def test_a_geometry_is_whole_and_positive(name, value):
    """Guards against a shape with which prompts cost nothing, or less."""
    with pytest.raises(ConfigError, match=rf"ModelGeometry\.{name} must be"):
        ModelGeometry(**{**GEOMETRY, name: value})


def test_widths_of_alike_layers():
    """Guards against a layer, or a head, that is left out."""
    geometry = ModelGeometry(**GEOMETRY)
    assert geometry.query_width == 4 * 8 * 64
    assert geometry.kv_width == 4 * 2 * 64


def test_widths_of_layers_that_differ():
    """Guards against the shape of one layer being taken for that of all."""
    geometry = ModelGeometry(layers=3, query_heads=(8, 4, 4), kv_heads=2, head_dim=(64, 32, 16), element_bytes=2)
    assert geometry.query_width == 8 * 64 + 4 * 32 + 4 * 16
    assert geometry.kv_width == 2 * (64 + 32 + 16)


def test_equal_shapes_are_equal():
    """Guards against one shape that is refused as another, since a file gave it as a list."""
    assert ModelGeometry(**{**GEOMETRY, "kv_heads": [2, 2, 2, 2]}) == ModelGeometry(**GEOMETRY)
