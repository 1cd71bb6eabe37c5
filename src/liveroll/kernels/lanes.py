"""How many lanes a kernel has for something: a power of two."""

from __future__ import annotations

from functools import cache


@cache
def lanes_for(count: int, least: int = 1) -> int:
    """The power of two that holds `count`, and at least `least`.

    Kernels of each layer ask for it, and Triton's function takes some 10 us of the host.
    """
    return max(1 << (count - 1).bit_length(), least)
