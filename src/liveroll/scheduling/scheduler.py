"""Which requests run, on which slots and pages: `plan`, run it on the device, `commit`, until nothing is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from liveroll.completion import FinishReason
from liveroll.errors import LogitsError
from liveroll.scheduling.admission import REFILL_SHARE, order_of_admission, refill_of
from liveroll.scheduling.clusters import ClusterFinder
from liveroll.scheduling.details import NOTHING, Wanted
from liveroll.scheduling.pages import SCRATCH_PAGE, PageAllocator
from liveroll.scheduling.plan import DecodeStep, Outcome, PrefillStep, StepPlan, StepResult, Wait
from liveroll.scheduling.request import Request, logits_complaint
from liveroll.scheduling.shares import Source
from liveroll.scheduling.sharing import Grant, SharedPrompts
from liveroll.scheduling.transcript import Transcript

StopSearch = Callable[[Request, np.ndarray], str | None]
"""Given a request and its response tokens, the stop string that the last of them completes, if any."""


class Scheduler:
    """Runs requests through a fixed number of slots and pages.

    Steps may be planned ahead of their results: until it is told otherwise, the scheduler takes every row to go on
    until its budget is spent, and a row that ended earlier is frozen on the device meanwhile.

    Admission takes pages for a request's context only, less those it shares with others of its prompt; each
    further page is taken when its row reaches it. When none is left, prompts kept for waiting requests are given
    up; after that the row admitted last goes back to the front of the queue with the tokens it has, and is
    prefilled over them again later.

    Args:
        requests: all that it may come to run.
        source: where they come from, a few at a time; None where all of them wait from the beginning.
        slots: rows of the running batch.
        allocator: the pages of the KV storage.
        page_size: tokens in a page.
        search_stop: finds stop strings; needed when a request has any.
        wanted: what results tell of each token besides its log-probability.
        clusters: finds rows whose shared keys attention is to read once; None where it reads them for each.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        slots: int,
        allocator: PageAllocator,
        page_size: int,
        search_stop: StopSearch | None = None,
        wanted: Wanted = NOTHING,
        source: Source | None = None,
        clusters: ClusterFinder | None = None,
    ) -> None:
        waiting = [] if source is not None else order_of_admission(requests)
        self._source = source
        self._sharing = SharedPrompts(waiting, allocator, page_size)
        self._clusters = clusters
        self._waiting = deque(waiting)
        self._allocator = allocator
        self._page_size = page_size
        self._search_stop = search_stop
        self._running: dict[int, Request] = {}
        self._free_slots = list(range(slots - 1, -1, -1))
        self._transcript = Transcript(slots, max((r.most_tokens for r in requests), default=1), wanted)
        # Of the next step of each slot: the position it feeds, the positions covered by pages, how many it can come to
        # need, and the tokens left to plan.
        self._position = np.zeros(slots, np.int64)
        self._covered = np.zeros(slots, np.int64)
        self._longest = np.zeros(slots, np.int64)
        self._left = np.zeros(slots, np.int64)
        self._active = np.zeros(slots, bool)
        self._tenancy = np.zeros(slots, np.int64)
        self._in_flight = 0
        self._has_stop_strings = np.zeros(slots, bool)
        self.preemptions = 0
        self.sampled = 0
        """Tokens taken in so far."""
        widest = self._pages_for(max((r.longest for r in requests), default=1))
        self.block_table = np.full((slots, widest), SCRATCH_PAGE, np.int32)
        """Pages of each slot in order of position, `[slots, pages of the longest row]`."""
        self.table_version = 0
        """Changes whenever `block_table` does."""

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens that were not run because another sample of the prompt had run them."""
        return self._sharing.shared_tokens

    def plan(self) -> StepPlan | Wait | None:
        """Decide the next step; None when every request has finished."""
        self._take_more()
        if admission := self._admit():
            self._in_flight += 1
            return admission
        if not self._running:
            return Wait() if self._in_flight else None
        if not self._cover_next_positions():
            return Wait()
        slots = np.flatnonzero(self._active & (self._left > 0))
        if not len(slots):
            return Wait()
        tenancies = self._tenancy[slots]
        clusters = None if self._clusters is None else self._clusters.find(slots, tenancies, self._running)
        step = DecodeStep(slots, tenancies, longest=int(self._position[slots].max()) + 1, clusters=clusters)
        self._position[slots] += 1
        self._left[slots] -= 1
        self._in_flight += 1
        return step

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Take in what a step sampled, oldest step first; the requests that it finished.

        Raises:
            LogitsError: the logits of a row were not numbers.
            ValueError: no step is in flight.
        """
        if not self._in_flight:
            raise ValueError("a step was committed that is not in flight")
        self._in_flight -= 1
        slots = plan.slots
        live = (result.outcomes != Outcome.IDLE) & (self._tenancy[slots] == plan.tenancies)
        strange = live & np.isnan(result.logprobs)
        if strange.any():
            raise LogitsError(logits_complaint(self._running[int(slots[strange][0])]))
        details = None if result.details is None else result.details.take(live)
        self._transcript.append(slots[live], result.tokens[live], result.logprobs[live], details)
        self.sampled += int(live.sum())
        finished = []
        for slot in slots[live & self._has_stop_strings[slots]].tolist():
            if found := self._find_stop(slot):
                finished.append(self._finish(slot, "stop", found))
        ended = live & (result.outcomes != Outcome.RUNNING)
        for slot, outcome, token in zip(
            slots[ended].tolist(), result.outcomes[ended].tolist(), result.tokens[ended].tolist(), strict=True
        ):
            if slot in self._running:
                stopped = outcome == Outcome.STOPPED
                finished.append(self._finish(slot, "stop" if stopped else "length", token if stopped else None))
        return finished

    def abort(self, requests: Iterable[Request]) -> list[Request]:
        """End requests with the tokens they have, running or queued; those of them that had not ended before."""
        named = set(requests)
        queued = [request for request in self._waiting if request in named]
        self._waiting = deque(request for request in self._waiting if request not in named)
        for request in queued:
            self._sharing.dequeue(request)
            request.finish_reason = "aborted"
        running = [slot for slot, request in self._running.items() if request in named]
        return queued + [self._finish(slot, "aborted", None) for slot in running]

    def check(self) -> None:
        """Raise AssertionError unless pages, slots and block table agree with one another."""
        held = [page for request in self._running.values() for page in request.pages]
        self._allocator.check([*held, *self._sharing.kept_pages()])
        self._sharing.check(self._waiting)
        for slot, request in self._running.items():
            row = self.block_table[slot, : len(request.pages)].tolist()
            assert row == request.pages, f"the block table of slot {slot} is stale"
            assert self._covered[slot] == len(request.pages) * self._page_size
        assert not set(self._free_slots) & set(self._running), "a slot is free and running"

    def _take_more(self) -> None:
        """Ask the source for requests, once as many slots are free as are refilled at a time."""
        if self._source is None or self._waiting:
            return
        if self._running and len(self._free_slots) < refill_of(len(self._position)):
            return
        taken = self._source()
        if not taken:
            self._source = None
        for request in taken:
            self._sharing.enqueue(request)
        self._waiting.extend(taken)

    def _admit(self) -> PrefillStep | None:
        refills = not self._running or len(self._free_slots) >= min(
            len(self._waiting), REFILL_SHARE * len(self._position)
        )
        admitted: list[tuple[Request, Grant]] = []
        # A page is kept back for every row that grows: one admitted onto their next pages would soon be preempted.
        growing = int((self._active & (self._covered < self._longest)).sum())
        while self._waiting and len(admitted) < len(self._free_slots):
            request = self._waiting[0]
            if not refills and not self._sharing.is_ready(request):
                break
            grant = self._sharing.admit(request, growing, self._waiting)
            if grant is None:
                break
            self._waiting.popleft()
            growing += len(request.pages) * self._page_size < request.longest
            admitted.append((request, grant))
        if not admitted:
            return None
        self._start([request for request, _ in admitted])
        return self._sharing.make_step(admitted, self._tenancy)

    def _start(self, requests: Sequence[Request]) -> None:
        """Give admitted requests slots."""
        slots = [self._free_slots.pop() for _ in requests]
        self.block_table[slots] = SCRATCH_PAGE
        for slot, request in zip(slots, requests, strict=True):
            request.slot = slot
            self.block_table[slot, : len(request.pages)] = request.pages
            self._transcript.start(slot, request.tokens, request.logprobs, request.details)
            self._running[slot] = request
        self.table_version += 1
        self._covered[slots] = [len(request.pages) * self._page_size for request in requests]
        # The prefill itself samples a token, which the step after it feeds.
        self._position[slots] = [request.length for request in requests]
        self._left[slots] = [request.left - 1 for request in requests]
        self._longest[slots] = [request.longest for request in requests]
        self._has_stop_strings[slots] = [bool(request.sampling.stop) for request in requests]
        self._active[slots] = True

    def _cover_next_positions(self) -> bool:
        """Give every row that goes on the page of its next position, oldest row first; False to wait for results."""
        uncovered = self._active & (self._position >= self._covered) & (self._left > 0)
        if not uncovered.any():
            return True
        for slot in [slot for slot in self._running if uncovered[slot]]:
            while slot in self._running and not self._sharing.make_room(1, self._waiting):
                # The tokens of a preempted row must all be known, and a result may free pages without preemption.
                if self._in_flight:
                    return False
                self._preempt(next(reversed(self._running)))
            if slot in self._running:
                request = self._running[slot]
                (page,) = self._allocator.allocate(1)
                self.block_table[slot, len(request.pages)] = page
                self.table_version += 1
                request.pages.append(page)
                self._covered[slot] += self._page_size
        return True

    def _preempt(self, slot: int) -> None:
        request = self._stop(slot)
        self._sharing.enqueue(request)
        self._waiting.appendleft(request)
        self._release(request)
        self.preemptions += 1

    def _finish(self, slot: int, reason: FinishReason, stop: int | str | None) -> Request:
        request = self._stop(slot)
        request.finish_reason, request.stop = reason, stop
        self._release(request)
        return request

    def _stop(self, slot: int) -> Request:
        """Take a row out of the running batch, with its tokens."""
        request = self._running.pop(slot)
        self._active[slot] = False
        self._tenancy[slot] += 1
        request.tokens, request.logprobs = self._transcript.read(slot)
        request.details = self._transcript.read_details(slot)
        self._free_slots.append(slot)
        return request

    def _release(self, request: Request) -> None:
        self._allocator.deallocate(request.pages)
        request.slot, request.pages, request.borrowed = None, [], 0

    def _find_stop(self, slot: int) -> str | None:
        if self._search_stop is None:
            raise ValueError("a request has stop strings and the scheduler cannot search for them")
        return self._search_stop(self._running[slot], self._transcript.tokens(slot))

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)
