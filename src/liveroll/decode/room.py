"""How much a row of the running batch can hold: enough for the call, and never less than before."""

from __future__ import annotations

from liveroll.config import RolloutConfig
from liveroll.decode.state import RowState
from liveroll.planning.capacity import round_capacity

_LEAST_STOPS = 8
_LEAST_ADJUSTED = 16


def make_room(config: RolloutConfig, state: RowState | None, longest: int, stops: int, adjusted: int) -> dict[str, int]:
    """Room for tokens, stop tokens and adjusted tokens in a row, by the names that recapture reasons give them.

    Args:
        config: the engine's.
        state: what there is.
        longest: tokens that the longest row of the call comes to hold.
        stops: most stop tokens of a row.
        adjusted: most tokens whose scores a row adjusts.
    """
    tokens, width = config.max_length or round_capacity(longest), max(_LEAST_STOPS, stops)
    adjusted = max(_LEAST_ADJUSTED, 1 << max(adjusted - 1, 0).bit_length())
    if state is not None:
        tokens = max(tokens, state.block_table.shape[1] * config.page_size)
        width, adjusted = max(width, state.stops.shape[1]), max(adjusted, state.adjusted.shape[1])
    return {
        "tokens a row": -(-tokens // config.page_size) * config.page_size,
        "stop tokens a row": width,
        "adjusted tokens a row": adjusted,
    }
