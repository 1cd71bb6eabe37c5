"""Who uses an engine: one call at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from liveroll.cutoff import Cutoff
from liveroll.errors import EngineStateError


@dataclass(eq=False)
class Claim:
    """Held by the one who uses the engine.

    Attributes:
        cutoff: ends rows of its call early; None while there is no call.
    """

    cutoff: Cutoff | None = None


class Occupancy:
    """Gives an engine to one claim at a time."""

    def __init__(self) -> None:
        self._claim: Claim | None = None

    @property
    def cutoff(self) -> Cutoff | None:
        """That of the call that is running; None without one."""
        claim = self._claim
        return None if claim is None else claim.cutoff

    @contextmanager
    def claim(self) -> Iterator[Claim]:
        """Hold the engine inside the block.

        Raises:
            EngineStateError: somebody else does.
        """
        if self._claim is not None:
            raise EngineStateError("this engine is running, or a stream of it is still open; exhaust or close it first")
        claim = Claim()
        try:
            self._claim = claim
            yield claim
        finally:
            if self._claim is claim:
                self._claim = None

    def holds(self, claim: Claim) -> bool:
        """Whether the engine is still this claim's."""
        return self._claim is claim

    def end(self) -> None:
        """Take the engine from whoever has it."""
        self._claim = None
