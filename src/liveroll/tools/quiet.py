"""Timing while the host runs at its own speed, and not while it shares its processor with somebody else's work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

SLOW = 1.3
"""Times its least that a piece of Python takes where the host is not quiet. Where others work on the same core it takes
about twice as long, for seconds on end; else its time is within a tenth. Measured on virtual hosts with eager forwards
of a 3B model, which then take 35 to 45 ms in place of 23."""

_TRIES, _FIRST_TRIES = 3, 30
_PAUSE_SECONDS = 0.02


def time_python() -> float:
    """Milliseconds of a fixed piece of Python, some tenths of one."""
    began = time.perf_counter()
    for number in range(5000):
        number & 7
    return (time.perf_counter() - began) * 1e3


class QuietHost:
    """Runs what is timed when the host is quiet, as far as that is worth waiting for.

    The host is quiet while a fixed piece of Python takes about the least that it has taken so far.

    Args:
        share: waiting takes at most so much of the time that is spent on what is timed.
        work_ms: runs the piece of Python and says how long it took.
        clock: of seconds.
        sleep: for seconds.
    """

    def __init__(
        self,
        share: float,
        *,
        work_ms: Callable[[], float] = time_python,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._share, self._work_ms, self._clock, self._sleep = share, work_ms, clock, sleep
        self._least_ms = min(work_ms() for _ in range(_FIRST_TRIES))
        self._patience = 0.0

    def run(self, timed: Callable[[], Result]) -> Result:
        """Run once the host is quiet, and once more where it was not at the end; what the last run returned."""
        self._wait()
        began = self._clock()
        result = timed()
        took = self._clock() - began
        if took <= self._patience and not self._is_quiet():
            self._patience -= took
            self._wait()
            result = timed()
        self._patience += self._share * took
        return result

    def _wait(self) -> None:
        began = self._clock()
        while (waited := self._clock() - began) < self._patience and not self._is_quiet():
            self._sleep(_PAUSE_SECONDS)
        self._patience = max(self._patience - waited, 0.0)

    def _is_quiet(self) -> bool:
        # The shortest of some, as an interruption makes a single one long.
        took = min(self._work_ms() for _ in range(_TRIES))
        self._least_ms = min(self._least_ms, took)
        return took <= SLOW * self._least_ms
