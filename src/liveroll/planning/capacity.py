"""How many tokens a row of the running batch is given room for."""

from __future__ import annotations

_LEAST = 256
_STEPS = 8


def round_capacity(tokens: int) -> int:
    """Tokens of room for a row that needs `tokens`, at least 256.

    Rounded up by an eighth of the power of two below at most, so that calls of similar length share one capacity,
    and with it their captured steps, at little memory.
    """
    step = max(1 << max(tokens.bit_length() - 1, 0), _LEAST) // _STEPS
    return max(-(-tokens // step) * step, _LEAST)
