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
from liveroll.scheduling.pages import PageAllocator
from liveroll.scheduling.plan import DecodeStep, Outcome, PrefillStep, StepPlan, StepResult, Wait
from liveroll.scheduling.request import Request, logits_complaint
from liveroll.scheduling.shares import Source
from liveroll.scheduling.sharing import Grant, SharedPrompts
from liveroll.scheduling.slots import Slots

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
        self._search_stop = search_stop
        self._in_flight = 0
        self.slots = Slots(slots, requests, page_size, wanted)
        """The running rows, which the scheduler alone moves."""
        self.preemptions = 0
        self.sampled = 0
        """Tokens taken in so far."""

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
        if not self.slots.running:
            return Wait() if self._in_flight else None
        if not self._cover_next_positions():
            return Wait()
        slots = self.slots.going_on()
        if not len(slots):
            return Wait()
        tenancies = self.slots.tenancy[slots]
        clusters = None if self._clusters is None else self._clusters.find(slots, tenancies, self.slots.running)
        self._in_flight += 1
        return DecodeStep(slots, tenancies, longest=self.slots.advance(slots), clusters=clusters)

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
        live = (result.outcomes != Outcome.IDLE) & (self.slots.tenancy[slots] == plan.tenancies)
        strange = live & np.isnan(result.logprobs)
        if strange.any():
            raise LogitsError(logits_complaint(self.slots.running[int(slots[strange][0])]))
        details = None if result.details is None else result.details.take(live)
        self.slots.transcript.append(slots[live], result.tokens[live], result.logprobs[live], details)
        self.sampled += int(live.sum())
        finished = []
        for slot in slots[live & self.slots.has_stop_strings[slots]].tolist():
            if found := self._find_stop(slot):
                finished.append(self._finish(slot, "stop", found))
        ended = live & (result.outcomes != Outcome.RUNNING)
        for slot, outcome, token in zip(
            slots[ended].tolist(), result.outcomes[ended].tolist(), result.tokens[ended].tolist(), strict=True
        ):
            if slot in self.slots.running:
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
        running = [slot for slot, request in self.slots.running.items() if request in named]
        return queued + [self._finish(slot, "aborted", None) for slot in running]

    def check(self) -> None:
        """Raise AssertionError unless pages, slots and block table agree with one another."""
        held = [page for request in self.slots.running.values() for page in request.pages]
        self._allocator.check([*held, *self._sharing.kept_pages()])
        self._sharing.check(self._waiting)
        self.slots.check()

    def _take_more(self) -> None:
        """Ask the source for requests, once as many slots are free as are refilled at a time."""
        if self._source is None or self._waiting:
            return
        if self.slots.running and self.slots.free < refill_of(len(self.slots)):
            return
        taken = self._source()
        if not taken:
            self._source = None
        for request in taken:
            self._sharing.enqueue(request)
        self._waiting.extend(taken)

    def _admit(self) -> PrefillStep | None:
        refills = not self.slots.running or self.slots.free >= min(len(self._waiting), REFILL_SHARE * len(self.slots))
        admitted: list[tuple[Request, Grant]] = []
        # A page is kept back for every row that grows: one admitted onto their next pages would soon be preempted.
        growing = self.slots.growing
        while self._waiting and len(admitted) < self.slots.free:
            request = self._waiting[0]
            if not refills and not self._sharing.is_ready(request):
                break
            grant = self._sharing.admit(request, growing, self._waiting)
            if grant is None:
                break
            self._waiting.popleft()
            growing += self.slots.will_grow(request)
            admitted.append((request, grant))
        if not admitted:
            return None
        self.slots.start([request for request, _ in admitted])
        return self._sharing.make_step(admitted, self.slots.tenancy)

    def _cover_next_positions(self) -> bool:
        """Give every row that goes on the page of its next position, oldest row first; False to wait for results."""
        running = self.slots.running
        for slot in self.slots.uncovered():
            while slot in running and not self._sharing.make_room(1, self._waiting):
                # The tokens of a preempted row must all be known, and a result may free pages without preemption.
                if self._in_flight:
                    return False
                self._preempt(next(reversed(running)))
            if slot in running:
                self.slots.add_page(slot, *self._allocator.allocate(1))
        return True

    def _preempt(self, slot: int) -> None:
        request = self.slots.stop(slot)
        self._sharing.enqueue(request)
        self._waiting.appendleft(request)
        self._release(request)
        self.preemptions += 1

    def _finish(self, slot: int, reason: FinishReason, stop: int | str | None) -> Request:
        request = self.slots.stop(slot)
        request.finish_reason, request.stop = reason, stop
        self._release(request)
        return request

    def _release(self, request: Request) -> None:
        self._allocator.deallocate(request.pages)
        request.slot, request.pages, request.borrowed = None, [], 0

    def _find_stop(self, slot: int) -> str | None:
        if self._search_stop is None:
            raise ValueError("a request has stop strings and the scheduler cannot search for them")
        return self._search_stop(self.slots.running[slot], self.slots.transcript.tokens(slot))
