"""What tokens weigh when top-p adds them up: `liveroll.decode.truncation.masses` on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from liveroll.decode.truncation import FAR, POWERS, SERIES

_FAR = tl.constexpr(FAR)
_POWERS = tl.constexpr(POWERS)
_SERIES = [tl.constexpr(term) for term in SERIES]
_TERM_0, _TERM_1, _TERM_2, _TERM_3, _TERM_4, _TERM_5, _TERM_6 = _SERIES


@triton.jit
def mass(score, top):
    """`liveroll.decode.truncation.masses` of a block, to the last bit."""
    distance = top - score
    power = (tl.where(distance < _FAR, distance, _FAR) * _POWERS).to(tl.int32)
    fraction = ((power & 0xFFFFFF) << 8).to(tl.uint32)
    mass = tl.full(fraction.shape, _TERM_6, tl.uint32)
    mass = _TERM_5 - tl.umulhi(mass, fraction)
    mass = _TERM_4 - tl.umulhi(mass, fraction)
    mass = _TERM_3 - tl.umulhi(mass, fraction)
    mass = _TERM_2 - tl.umulhi(mass, fraction)
    mass = _TERM_1 - tl.umulhi(mass, fraction)
    mass = _TERM_0 - tl.umulhi(mass, fraction)
    return (mass.to(tl.int64) << 9) >> tl.minimum(power >> 24, 63).to(tl.int64)


@triton.jit
def find_goal(mass, tail):
    """The mass that top-p asks for."""
    return tl.maximum(mass - (tail.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)
