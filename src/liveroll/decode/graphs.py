"""The captured steps of an engine, and when they must be captured again."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from liveroll.decode.capture import CaptureBackend, CapturedStep, Step

logger = logging.getLogger("liveroll")

GraphKey = tuple[Any, ...]
"""What a captured step is found by; the first entry says of what kind it is."""


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
        self._steps: OrderedDict[GraphKey, CapturedStep] = OrderedDict()
        self.captures: Counter[str] = Counter()
        """Steps captured, by kind."""
        self.replays: Counter[str] = Counter()
        """Captured steps run, by kind."""
        self.recapture_reasons: list[str] = []

    @property
    def bytes(self) -> int:
        """Bytes that the captured steps hold."""
        return 0 if self._backend is None else self._backend.bytes()

    def holds(self, key: GraphKey) -> bool:
        """Whether a step is captured under a key."""
        return key in self._steps

    def warm_up(self, step: Step) -> None:
        """Run a step, as must be done before it is recorded."""
        self._ready().warm_up(step)

    def record(self, key: GraphKey, step: Step) -> None:
        """Keep a step that was warmed up, captured, under a key."""
        if self._limit is not None and len(self._steps) >= self._limit:
            self._steps.popitem(last=False)
        self._steps[key] = self._ready().record(step)
        self.captures[key[0]] += 1

    def discard(self, key: GraphKey) -> None:
        """Forget the step captured under a key, if there is one."""
        self._steps.pop(key, None)

    def replay(self, key: GraphKey) -> None:
        """Run the step captured under a key again."""
        self._steps.move_to_end(key)
        self._steps[key].replay()
        self.replays[key[0]] += 1

    def drop(self, reason: str | None) -> None:
        """Forget all captured steps and their memory; a reason is noted where there were any."""
        if self._steps and reason is not None:
            self.recapture_reasons.append(reason)
            logger.info("capturing again: %s", reason)
        self._steps.clear()
        self._backend = None

    def _ready(self) -> CaptureBackend:
        if self._backend is None:
            self._backend = self._make_backend()
        return self._backend
