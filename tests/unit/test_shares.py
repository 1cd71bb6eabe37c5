"""Every request is dealt to one rank or lies in one chunk, and a scheduler that asks for them runs them all."""

from __future__ import annotations

from fake_device import VOCAB, FakeDevice, ending_of, make_request, search_stop
from hypothesis import given, settings
from hypothesis import strategies as st

from liveroll.scheduling.admission import order_of_admission, refill_of
from liveroll.scheduling.pages import PageAllocator
from liveroll.scheduling.plan import Wait
from liveroll.scheduling.request import Request
from liveroll.scheduling.scheduler import Scheduler
from liveroll.scheduling.shares import deal

steady = settings(deadline=None, derandomize=True, database=None)


def samples(prompts: int, each: int, budget: int = 8) -> list[Request]:
    """Make `each` requests for every one of so many prompts."""
    return [
        make_request(prompt * each + sample, 3, budget, kind=prompt)
        for prompt in range(prompts)
        for sample in range(each)
    ]


def rows(requests) -> list[int]:
    return [request.row for request in requests]


@steady
@given(
    each=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    ranks=st.integers(1, 9),
    slots=st.integers(1, 40),
)
def test_every_request_once_and_none_without_a_slot(each, ranks, slots):
    """Guards against requests that are lost or run twice, and ranks that hold back what others could run."""
    requests = [make_request(0, 3, 8, kind=prompt) for prompt, count in enumerate(each) for _ in range(count)]
    for row, request in enumerate(requests):
        request.row = row
    refill = refill_of(slots)
    shares = deal(requests, ranks, slots, refill)
    given_away = [request for part in (*shares.hands, *shares.chunks) for request in part]
    assert sorted(rows(given_away)) == list(range(len(requests)))
    assert len(shares.hands) == ranks
    even = -(-len(requests) // ranks)
    assert all(len(hand) <= min(slots, even) for hand in shares.hands)
    assert all(0 < len(chunk) <= refill for chunk in shares.chunks)
    left = sum(map(len, shares.chunks))
    for chunk in shares.chunks:
        target = min(refill, -(-left // (2 * ranks)))
        assert len(chunk) >= target
        assert len({request.group for request in chunk[target - 1 :]}) == 1, "more than the target, for another prompt"
        left -= len(chunk)


def test_a_call_that_fits_all_slots_is_dealt_whole():
    """Guards against ranks that fill up while others get nothing, and against needless prefills of one prompt."""
    shares = deal(samples(8, 4), ranks=4, slots=32, refill=8)
    assert not shares.chunks
    assert [[request.group for request in hand] for hand in shares.hands] == [
        [1000 * prompt + 3 for prompt in (rank, rank + 4) for _ in range(4)] for rank in range(4)
    ]


def test_requests_of_like_length_come_to_different_ranks():
    """Guards against one rank that is dealt all of the longest requests."""
    requests = [make_request(row, 3, 100 - row) for row in range(16)]
    shares = deal(requests, ranks=4, slots=2, refill=1)
    assert [rows(hand) for hand in shares.hands] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [rows(chunk) for chunk in shares.chunks] == [[row] for row in range(8, 16)]


def test_chunks_shrink():
    """Guards against a last chunk that keeps one rank busy when all others are done."""
    shares = deal(samples(1000, 1), ranks=4, slots=64, refill=16)
    sizes = [len(chunk) for chunk in shares.chunks]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 16
    assert sizes[-7:] == [1] * 7


def test_samples_of_a_prompt_stay_together_where_they_fit():
    """Guards against a prompt that is prefilled by every rank."""
    shares = deal(samples(20, 4), ranks=2, slots=8, refill=4)
    for part in (*shares.hands, *shares.chunks):
        for prompt in {request.group for request in part}:
            assert sum(request.group == prompt for request in part) == 4


@steady
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    slots=st.integers(1, 8),
    spare=st.integers(0, 8),
    ahead=st.integers(0, 3),
    stop=st.integers(0, VOCAB - 1),
)
def test_a_scheduler_runs_what_its_source_gives(sizes, slots, spare, ahead, stop):
    """Guards against requests that were taken and not run, and a source asked for more than there are slots free."""
    total = sum(sizes)
    requests = order_of_admission(
        [make_request(row, 3, 5 + row % 7, kind=row // 2, stop_token_ids=(stop,)) for row in range(total)]
    )
    endings = {request.row: ending_of(request) for request in requests}
    parts = [requests[sum(sizes[:index]) : sum(sizes[: index + 1])] for index in range(len(sizes))]
    slots = min(slots, total)
    asked = []

    def source() -> list[Request]:
        asked.append((slots - len(scheduler.slots.running), len(scheduler.slots.running)))
        return parts.pop(0) if parts else []

    longest = max(-(-request.longest // 4) for request in requests)
    allocator = PageAllocator(1 + longest + spare)
    scheduler = Scheduler(
        requests, slots=slots, allocator=allocator, page_size=4, search_stop=search_stop, source=source
    )
    device = FakeDevice(4)
    launched = []
    finished = []
    while (plan := scheduler.plan()) is not None:
        scheduler.check()
        if not isinstance(plan, Wait):
            launched.append((plan, device.run(plan, scheduler)))
        while len(launched) > (0 if isinstance(plan, Wait) else ahead):
            finished += scheduler.commit(*launched.pop(0))
    assert sorted(rows(finished)) == list(range(total))
    for request in finished:
        assert request.tokens.tolist() == endings[request.row].tokens
    assert all(not running or free >= refill_of(slots) for free, running in asked)
    assert len(asked) == len(sizes) + 1, "a source that has nothing left is not asked again"
