"""What ends rows of a call before their time: `abort`, and limits of the whole call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from queue import SimpleQueue
from typing import Any, ClassVar

from liveroll.config_checks import check_number, check_whole
from liveroll.errors import PromptError
from liveroll.scheduling.request import Request


@dataclass(frozen=True)
class Limits:
    """What a whole call may take; None for no limit.

    Raises:
        ConfigError: a limit is not a positive number.
    """

    max_seconds: float | None = None
    max_total_tokens: int | None = None

    of_call: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(self, "max_seconds", low=0.0, low_open=True, optional=True)
        check_whole(self, "max_total_tokens", low=1, optional=True)


class Cutoff:
    """Names the requests of a running call that are to end with what they have.

    `abort` may be called by any thread; `due` belongs to the one that runs the call. The time begins now.

    Args:
        requests: those of the call.
        limits: of the call.
        watch: called whenever `due` is; it may raise, to end the whole call.
    """

    def __init__(self, requests: Sequence[Request], limits: Limits, watch: Callable[[], None] = lambda: None) -> None:
        self._requests = requests
        self._limits = limits
        self._watch = watch
        self._started = time.monotonic()
        self._named: SimpleQueue[Request] = SimpleQueue()

    @property
    def counts_tokens(self) -> bool:
        """Whether `due` needs to know how many tokens were sampled."""
        return self._limits.max_total_tokens is not None

    def abort(self, prompt_index: int, sample_index: int | None) -> int:
        """Name the samples of a prompt, or one of them; how many had not ended.

        Raises:
            PromptError: an index is no whole number, or the call has no such prompt or sample.
        """
        _check_index("prompt_index", prompt_index)
        if sample_index is not None:
            _check_index("sample_index", sample_index)
        chosen = [
            request
            for request in self._requests
            if request.prompt_index == prompt_index and sample_index in (None, request.sample_index)
        ]
        if not chosen:
            sample = "" if sample_index is None else f"sample {sample_index} of "
            raise PromptError(f"{sample}prompt {prompt_index} is not in the call that is running")
        running = [request for request in chosen if request.finish_reason is None]
        for request in running:
            self._named.put(request)
        return len(running)

    def due(self, sampled: int) -> list[Request]:
        """Requests that are to end now: those named since the last time, or all once a limit is reached.

        No limit counts before the call has sampled a token, so that calls that go on with one another's completions
        come to an end.

        Args:
            sampled: tokens that the call has sampled so far; unless `counts_tokens`, any number above 0 if some.
        """
        self._watch()
        if sampled and self._is_spent(sampled):
            return [request for request in self._requests if request.finish_reason is None]
        named = []
        while not self._named.empty():
            named.append(self._named.get())
        return [request for request in dict.fromkeys(named) if request.finish_reason is None]

    def _is_spent(self, sampled: int) -> bool:
        seconds, tokens = self._limits.max_seconds, self._limits.max_total_tokens
        late = seconds is not None and time.monotonic() - self._started >= seconds
        return late or (tokens is not None and sampled >= tokens)


def _check_index(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise PromptError(f"{name} of abort must be a whole number, not {value!r}")
