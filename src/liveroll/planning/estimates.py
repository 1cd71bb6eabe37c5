"""What forwards and decode steps are estimated to take."""

from __future__ import annotations

import numpy as np

from liveroll.planning.costs import CostModel
from liveroll.planning.geometry import ModelGeometry


def attention_gflops(squares: int, geometry: ModelGeometry) -> float:
    """10^9 floating-point operations of attention over sequences whose squared lengths add up to `squares`."""
    return 4 * squares * geometry.query_width / 1e9


def kv_mib(tokens: int, geometry: ModelGeometry) -> float:
    """2^20 bytes of keys and values of so many tokens."""
    return 2 * tokens * geometry.kv_width * geometry.element_bytes / 2**20


def padded_row_ms(widths: np.ndarray, costs: CostModel, geometry: ModelGeometry) -> np.ndarray:
    """What one row of each width adds to a padded forward."""
    widths = widths.astype(np.float64)
    linear = costs.token_ms + costs.kv_ms_per_mib * kv_mib(1, geometry)
    quadratic: float = costs.attention_ms_per_gflop * attention_gflops(1, geometry)
    rows: np.ndarray = linear * widths + quadratic * widths * widths
    return rows
