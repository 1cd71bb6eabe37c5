"""What requests with one prompt share: the pages of its keys and values, and the logits behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from liveroll.scheduling.pages import PageAllocator
from liveroll.scheduling.plan import PrefillStep
from liveroll.scheduling.request import Request


@dataclass
class _Kept:
    """What is kept of a prompt for those of its requests that wait.

    Attributes:
        pages: the pages that the prompt fills.
        last: the page that it fills in part, if it does.
        logits: whether the logits behind it are kept; `last` goes with them.
    """

    pages: list[int] = field(default_factory=list)
    last: int | None = None
    logits: bool = False


class Grant(NamedTuple):
    """How an admitted request comes to its context.

    Attributes:
        runs: whether its context is run; otherwise its logits are those kept of its prompt.
        copied: the page that its last one begins as a copy of, or None.
    """

    runs: bool
    copied: int | None


class SharedPrompts:
    """Gives requests their pages, and keeps what those that wait will share.

    A request without tokens runs its prompt unless one before it did. Full pages of a prompt are shared by
    reference. Its last page, where it is not full, goes on as a page of one running request at a time, since keys
    of the prompt stay as they are while those behind it come and go; any other begins with a copy of it. A request
    that comes back with tokens shares the full pages and runs its whole context, without writing to them.

    A prompt is kept while requests of it wait, and the logits behind it while requests without tokens do. When pages
    run out, what no running row holds is given up first, and of that what is needed last; such a prompt is run again
    for its next request.

    Args:
        requests: all of the call.
        allocator: the pages of the KV storage.
        page_size: tokens in a page.
    """

    def __init__(self, requests: Sequence[Request], allocator: PageAllocator, page_size: int) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._waiting = Counter(request.group for request in requests)
        self._waiting_for_logits = Counter(request.group for request in requests if not len(request.tokens))
        self._kept: dict[int, _Kept] = {}
        self.shared_tokens = 0

    def is_ready(self, request: Request) -> bool:
        """Whether a request can be admitted without a forward."""
        kept = self._kept.get(request.group)
        return kept is not None and kept.logits and not len(request.tokens)

    def enqueue(self, request: Request) -> None:
        """Note that a request waits. One that ran still has its pages, and those of its prompt are kept."""
        self._waiting[request.group] += 1
        self._waiting_for_logits[request.group] += not len(request.tokens)
        full = request.pages[: len(request.prompt) // self._page_size]
        if full and request.group not in self._kept:
            self._allocator.share(full)
            self._kept[request.group] = _Kept(full)

    def dequeue(self, request: Request) -> None:
        """Note that a request does not wait any more, and give back what was kept for it alone."""
        self._waiting[request.group] -= 1
        self._waiting_for_logits[request.group] -= not len(request.tokens)
        if request.group not in self._kept:
            return
        if not self._waiting[request.group]:
            self._give_back(request.group, everything=True)
        elif not self._waiting_for_logits[request.group]:
            self._drop_logits(request.group)

    def admit(self, request: Request, kept_back: int, queue: Iterable[Request]) -> Grant | None:
        """Give a waiting request the pages of its context; None, and nothing changes, where there are too few.

        Args:
            request: waits no longer afterwards, if it gets them.
            kept_back: pages that must be left over for others.
            queue: all requests that wait, the next one first.
        """
        runs = not self.is_ready(request)
        kept = self._kept.get(request.group, _Kept())
        borrowed, copied = list(kept.pages), None
        if not runs and kept.last is not None:
            if self._allocator.holders(kept.last) == 1:
                borrowed.append(kept.last)
            else:
                copied = kept.last
        # What is shared cannot be given up to make room for the rest.
        self._allocator.share(borrowed)
        needed = self._pages_for(request.length) - len(borrowed)
        lacking = needed + kept_back - self._allocator.available
        if lacking > 0 and lacking > self._unused():
            self._allocator.deallocate(borrowed)
            return None
        self.make_room(needed, queue)
        request.pages = borrowed + self._allocator.allocate(needed)
        request.borrowed = len(borrowed)
        self.dequeue(request)
        if not runs:
            self.shared_tokens += len(request.prompt)
        elif self._waiting[request.group]:
            self._keep(request)
        return Grant(runs, copied)

    def make_step(self, admitted: Sequence[tuple[Request, Grant]], tenancy: np.ndarray) -> PrefillStep:
        """The step that starts requests admitted together; `tenancy` is that of each slot."""
        sources: list[int] = []
        copies: list[tuple[int, int]] = []
        ran: dict[int, int] = {}
        for index, (request, grant) in enumerate(admitted):
            if grant.runs and not len(request.tokens):
                ran[request.group] = index
            sources.append(index if grant.runs else ran.get(request.group, ~request.group))
            if grant.copied is not None:
                copies.append((grant.copied, request.pages[-1]))
        needed_again = frozenset(ran.get(group, ~group) for group, kept in self._kept.items() if kept.logits)
        slots = np.array([request.slot for request, _ in admitted], np.int64)
        requests = tuple(request for request, _ in admitted)
        return PrefillStep(requests, slots, tenancy[slots], tuple(sources), needed_again, tuple(copies))

    def make_room(self, pages: int, queue: Iterable[Request]) -> bool:
        """Have so many pages free, for which kept ones that no running row holds are given up; whether there are."""
        if self._allocator.available < pages and self._unused():
            groups = dict.fromkeys(request.group for request in queue if request.group in self._kept)
            for group in reversed(groups):
                if self._allocator.available >= pages:
                    break
                self._give_back(group, everything=False)
        return self._allocator.available >= pages

    def kept_pages(self) -> Iterator[int]:
        """Every page that is kept, once for each prompt it is kept of."""
        for kept in self._kept.values():
            yield from kept.pages
            if kept.last is not None:
                yield kept.last

    def check(self, queue: Iterable[Request]) -> None:
        """Raise AssertionError unless what is kept is kept for requests that wait."""
        queue = list(queue)
        assert +self._waiting == Counter(request.group for request in queue), "other requests wait than are counted"
        assert set(self._kept) <= set(+self._waiting), "a prompt is kept for nobody"

    def _keep(self, request: Request) -> None:
        """Keep what a request, about to be run, has in common with those that wait for the same prompt."""
        kept = self._kept.get(request.group, _Kept())
        full, rest = divmod(len(request.prompt), self._page_size)
        if not kept.pages:
            kept.pages = request.pages[:full]
            self._allocator.share(kept.pages)
        if not len(request.tokens) and self._waiting_for_logits[request.group]:
            kept.logits = True
            if rest:
                kept.last = request.pages[full]
                self._allocator.share([kept.last])
        if kept.pages or kept.logits:
            self._kept[request.group] = kept

    def _give_back(self, group: int, *, everything: bool) -> None:
        """Give back what is kept of a prompt: everything, or what no running row holds."""
        kept = self._kept[group]
        if kept.last is not None and (everything or self._allocator.holders(kept.last) == 1):
            self._drop_logits(group)
        if kept.pages and (everything or self._allocator.holders(kept.pages[0]) == 1):
            self._allocator.deallocate(kept.pages)
            kept.pages = []
        if not kept.pages and kept.last is None:
            self._kept.pop(group, None)

    def _drop_logits(self, group: int) -> None:
        kept = self._kept[group]
        if kept.last is not None:
            self._allocator.deallocate([kept.last])
        kept.last, kept.logits = None, False
        if not kept.pages:
            del self._kept[group]

    def _unused(self) -> int:
        """How many of the kept pages no running row holds; those that a prompt fills are held together."""
        count = 0
        for kept in self._kept.values():
            if kept.pages and self._allocator.holders(kept.pages[0]) == 1:
                count += len(kept.pages)
            count += kept.last is not None and self._allocator.holders(kept.last) == 1
        return count

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)
