"""The captured decode steps of an engine, and when they must be captured again."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable

from liveroll.decode.capture import CaptureBackend, CapturedStep, Step

logger = logging.getLogger("liveroll")


class GraphStore:
    """Keeps captured steps by key, at most `limit` of them; the one unused for longest leaves.

    Args:
        make_backend: gives the backend that captures; a new one for each generation of steps.
        limit: steps kept, or None for all.
    """

    def __init__(self, make_backend: Callable[[], CaptureBackend], limit: int | None) -> None:
        self._make_backend = make_backend
        self._backend: CaptureBackend | None = None
        self._limit = limit
        self._steps: OrderedDict[Hashable, CapturedStep] = OrderedDict()
        self.captures = 0
        self.replays = 0
        self.recapture_reasons: list[str] = []

    @property
    def bytes(self) -> int:
        """Bytes that the captured steps hold."""
        return 0 if self._backend is None else self._backend.bytes()

    def holds(self, key: Hashable) -> bool:
        """Whether a step is captured under a key."""
        return key in self._steps

    def capture(self, key: Hashable, step: Step) -> None:
        """Capture a step under a key."""
        if self._limit is not None and len(self._steps) >= self._limit:
            self._steps.popitem(last=False)
        if self._backend is None:
            self._backend = self._make_backend()
        self._steps[key] = self._backend.capture(step)
        self.captures += 1

    def replay(self, key: Hashable) -> None:
        """Run the step captured under a key again."""
        self._steps.move_to_end(key)
        self._steps[key].replay()
        self.replays += 1

    def drop(self, reason: str | None) -> None:
        """Forget all captured steps and their memory; a reason is noted where there were any."""
        if self._steps and reason is not None:
            self.recapture_reasons.append(reason)
            logger.info("capturing again: %s", reason)
        self._steps.clear()
        self._backend = None
