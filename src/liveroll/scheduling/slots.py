"""The rows of the running batch: whose each slot is, what its next step feeds, and which pages it has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from liveroll.scheduling.details import Wanted
from liveroll.scheduling.pages import SCRATCH_PAGE
from liveroll.scheduling.request import Request
from liveroll.scheduling.transcript import Transcript


class Slots:
    """Rows that come and go on a fixed number of slots.

    Args:
        count: slots.
        requests: all that may come to run on them.
        page_size: tokens in a page.
        wanted: what is kept of each token besides its log-probability.
    """

    def __init__(self, count: int, requests: Sequence[Request], page_size: int, wanted: Wanted) -> None:
        self._page_size = page_size
        self._free = list(range(count - 1, -1, -1))
        self.running: dict[int, Request] = {}
        """The request on each slot that is taken, the one admitted first in front."""
        self.tenancy = np.zeros(count, np.int64)
        """How many rows have left each slot: tells a row from those that were there before it."""
        self.transcript = Transcript(count, max((r.most_tokens for r in requests), default=1), wanted)
        self.has_stop_strings = np.zeros(count, bool)
        # Of the next step of each slot: the position it feeds, the positions covered by pages, how many it can come to
        # need, and the tokens left to plan.
        self._position = np.zeros(count, np.int64)
        self._covered = np.zeros(count, np.int64)
        self._longest = np.zeros(count, np.int64)
        self._left = np.zeros(count, np.int64)
        self._active = np.zeros(count, bool)
        widest = -(-max((r.longest for r in requests), default=1) // page_size)
        self.block_table = np.full((count, widest), SCRATCH_PAGE, np.int32)
        """Pages of each slot in order of position, `[slots, pages of the longest row]`."""
        self.table_version = 0
        """Changes whenever `block_table` does."""

    def __len__(self) -> int:
        return len(self._position)

    @property
    def free(self) -> int:
        """Slots on which nothing runs."""
        return len(self._free)

    @property
    def growing(self) -> int:
        """Rows that can come to need another page."""
        return int((self._active & (self._covered < self._longest)).sum())

    def will_grow(self, request: Request) -> bool:
        """Whether a request that has its first pages can come to need another."""
        return len(request.pages) * self._page_size < request.longest

    def start(self, requests: Sequence[Request]) -> None:
        """Give slots to requests that have the pages of their contexts; there are as many free."""
        slots = [self._free.pop() for _ in requests]
        self.block_table[slots] = SCRATCH_PAGE
        for slot, request in zip(slots, requests, strict=True):
            request.slot = slot
            self.block_table[slot, : len(request.pages)] = request.pages
            self.transcript.start(slot, request.tokens, request.logprobs, request.details)
            self.running[slot] = request
        self.table_version += 1
        self._covered[slots] = [len(request.pages) * self._page_size for request in requests]
        # The prefill itself samples a token, which the step after it feeds.
        self._position[slots] = [request.length for request in requests]
        self._left[slots] = [request.left - 1 for request in requests]
        self._longest[slots] = [request.longest for request in requests]
        self.has_stop_strings[slots] = [bool(request.sampling.stop) for request in requests]
        self._active[slots] = True

    def stop(self, slot: int) -> Request:
        """Take a row off its slot, with its tokens."""
        request = self.running.pop(slot)
        self._active[slot] = False
        self.tenancy[slot] += 1
        request.tokens, request.logprobs = self.transcript.read(slot)
        request.details = self.transcript.read_details(slot)
        self._free.append(slot)
        return request

    def uncovered(self) -> list[int]:
        """Slots of rows that go on and have no page for their next position, oldest row first."""
        lacking = self._active & (self._position >= self._covered) & (self._left > 0)
        return [slot for slot in self.running if lacking[slot]] if lacking.any() else []

    def add_page(self, slot: int, page: int) -> None:
        """Give a row the page behind those it has."""
        request = self.running[slot]
        self.block_table[slot, len(request.pages)] = page
        self.table_version += 1
        request.pages.append(page)
        self._covered[slot] += self._page_size

    def going_on(self) -> np.ndarray:
        """Int64 slots of rows with tokens left to plan."""
        return np.flatnonzero(self._active & (self._left > 0))

    def advance(self, slots: np.ndarray) -> int:
        """Count the next token of these rows as planned; the keys that the longest of them attends to for it."""
        longest = int(self._position[slots].max()) + 1
        self._position[slots] += 1
        self._left[slots] -= 1
        return longest

    def check(self) -> None:
        """Raise AssertionError unless slots, pages and block table agree with one another."""
        for slot, request in self.running.items():
            row = self.block_table[slot, : len(request.pages)].tolist()
            assert row == request.pages, f"the block table of slot {slot} is stale"
            assert self._covered[slot] == len(request.pages) * self._page_size
        assert not set(self._free) & set(self.running), "a slot is free and running"
