"""Whatever the slots, pages and lengths, every request comes to the end that its tokens give it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
import pytest
from fake_device import LETTERS, VOCAB, Ending, FakeDevice, ending_of, make_request, search_stop, token_at
from hypothesis import Phase, event, find, given, settings
from hypothesis import strategies as st

from liveroll.scheduling.admission import REFILL_SHARE
from liveroll.scheduling.clusters import NO_CLUSTERS, ClusterFinder
from liveroll.scheduling.pages import SCRATCH_PAGE, PageAllocator
from liveroll.scheduling.plan import DecodeStep, Outcome, PrefillStep, StepPlan, StepResult, Wait
from liveroll.scheduling.request import Request
from liveroll.scheduling.scheduler import Scheduler

steady = settings(deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Case:
    """A call: requests as arguments of `make_request`, and what they are run on."""

    requests: tuple[dict, ...]
    slots: int
    page_size: int
    spare_pages: int
    ahead: int = 0
    cluster_rows: int = 0


def key_of(request: Request) -> bytes:
    return request.prompt.tobytes()


@st.composite
def cases(draw) -> Case:
    # Fewer prompts than requests: some share one.
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    prompt = st.integers(0, len(lengths) - 1)
    request = st.fixed_dictionaries(
        {
            "kind": prompt,
            "budget": st.integers(1, 30),
            "stop_token_ids": st.sets(st.integers(0, VOCAB - 1), max_size=1).map(tuple),
            "stop": st.lists(st.text(LETTERS, min_size=1, max_size=2), max_size=2).map(tuple),
            "given": st.lists(st.integers(0, 1), max_size=6).map(tuple),
        }
    ).filter(lambda arguments: sum(arguments["given"]) < arguments["budget"])
    requests = draw(st.lists(request, min_size=1, max_size=10))
    return Case(
        requests=tuple({"prompt": lengths[request["kind"]], **request} for request in requests),
        slots=draw(st.integers(1, 6)),
        page_size=draw(st.integers(1, 5)),
        spare_pages=draw(st.integers(0, 10)),
        ahead=draw(st.integers(0, 3)),
        cluster_rows=draw(st.sampled_from([0, 2, 3, 4])),
    )


class Drive:
    """Runs a case to its end and holds every step to the scheduler's rules, by a queue of its own."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.requests = [make_request(row, **arguments) for row, arguments in enumerate(case.requests)]
        self.endings = [ending_of(request) for request in self.requests]
        longest = max(self.pages_for(request.longest) for request in self.requests)
        self.allocator = PageAllocator(1 + longest + case.spare_pages)
        self.scheduler = Scheduler(
            self.requests,
            slots=case.slots,
            allocator=self.allocator,
            page_size=case.page_size,
            search_stop=search_stop,
            clusters=ClusterFinder(case.page_size, case.cluster_rows, 1) if case.cluster_rows else None,
        )
        self.device = FakeDevice(case.page_size)
        left = [r.sampling.max_new_tokens - r.given_mask.tolist().count(1) for r in self.requests]
        self.queue = sorted(self.requests, key=lambda r: (-left[r.row], r.group))
        self.running: list[Request] = []
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.done: Counter[int] = Counter()
        # Of the next step of each row: the position that it feeds, and how many steps are left.
        self.position: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.steps: list[StepPlan] = []
        self.shared_tokens = 0

    def run(self) -> Drive:
        while (plan := self.plan()) is not None:
            waiting = isinstance(plan, Wait)
            if not isinstance(plan, Wait):
                self.steps.append(plan)
                self.in_flight.append((plan, self.device.run(plan, self.scheduler)))
            while len(self.in_flight) > (0 if waiting else self.case.ahead):
                self.commit(*self.in_flight.popleft())
        assert self.done == Counter(range(len(self.requests)))
        assert [Ending.reached(request) for request in self.requests] == self.endings
        # Every step brings a token, but those launched for a row before it was known to have ended.
        idle = self.case.ahead * len(self.requests)
        sampled = sum(len(r.tokens) - len(r.given_mask) for r in self.requests)
        assert self.scheduler.sampled == sampled
        assert len(self.steps) <= sampled + idle
        assert self.scheduler.waiting == len(self.queue) == 0
        assert self.allocator.available == self.allocator.pages - 1
        assert self.scheduler.plan() is None
        return self

    def plan(self) -> StepPlan | Wait | None:
        free, available = self.case.slots - len(self.running), self.available()
        before = {request.row: (request.slot, list(request.pages)) for request in self.running}
        table, version = self.scheduler.slots.block_table.copy(), self.scheduler.slots.table_version
        preempted = self.scheduler.preemptions
        refills = not self.running or free >= min(len(self.queue), REFILL_SHARE * self.case.slots)
        fits = bool(self.queue) and free > 0 and self.fits(self.queue[0])
        plan = self.scheduler.plan()
        self.scheduler.check()
        asking = sum(self.pages_for(self.position[r.row] + 1) > len(before[r.row][1]) for r in self.going_on())
        if isinstance(plan, PrefillStep):
            assert fits, "a request was admitted that does not fit"
            assert refills or all(source < 0 for source in plan.sources), "a prompt was run for too few rows"
            self.check_admission(plan, free if refills else 0, before)
        elif plan is None:
            assert not self.running
            assert not self.in_flight
        elif isinstance(plan, Wait):
            assert self.in_flight, "nothing to wait for"
            assert not self.going_on() or asking > available, "a step could have been planned"
        else:
            assert isinstance(plan, DecodeStep)
            self.check_decode(plan, before, asking - available)
            preempted += len(before) - len(self.running)
        assert isinstance(plan, PrefillStep) or not (fits and refills), "a request that fits was left out"
        assert self.scheduler.preemptions == preempted
        assert self.scheduler.waiting == len(self.queue)
        assert self.scheduler.shared_tokens == self.shared_tokens
        if not np.array_equal(table, self.scheduler.slots.block_table):
            assert self.scheduler.slots.table_version != version
        for request in self.queue:
            assert (request.slot, request.pages, request.borrowed) == (None, [], 0)
        return plan

    def available(self) -> int:
        """Pages that no row holds: those kept for requests that wait can be had for the asking."""
        return self.allocator.pages - 1 - len({page for request in self.running for page in request.pages})

    def fits(self, request: Request) -> bool:
        """Whether there are pages for what a request does not share, and one for every row that grows."""
        siblings = any(key_of(other) == key_of(request) for other in self.running)
        shared = len(request.prompt) // self.case.page_size if siblings else 0
        growing = sum(self.pages_for(other.longest) > len(other.pages) for other in self.running)
        return self.pages_for(len(request.context)) - shared + growing <= self.available()

    def check_admission(self, plan: PrefillStep, free: int, before: dict) -> None:
        count = len(plan.admitted)
        assert list(plan.admitted) == self.queue[:count], "the queue is not served in order"
        assert before == {r.row: (r.slot, list(r.pages)) for r in self.running}, "a running row was moved"
        self.running += plan.admitted
        del self.queue[:count]
        assert count >= free or not self.queue or not self.fits(self.queue[0]), "a request that fits was left out"
        new = {key_of(request) for request in self.queue if not len(request.tokens)}
        run = [key_of(r) for i, r in enumerate(plan.admitted) if plan.sources[i] == i and not len(r.tokens)]
        assert len(set(run)) == len(run), "a prompt was run twice in one step"
        kept = {plan.group_of(source) for source in plan.kept}
        assert kept <= {request.group for request in self.requests if key_of(request) in new}
        held = {page for _, pages in before.values() for page in pages}
        for index, request in enumerate(plan.admitted):
            if plan.sources[index] == index:
                assert not held & set(request.pages[request.borrowed :]), "a prefill writes to a page of another row"
            else:
                self.shared_tokens += len(request.prompt)
            held |= set(request.pages)
            self.position[request.row] = len(request.context)
            sampled = len(request.tokens) - request.given_mask.tolist().count(0)
            self.left[request.row] = request.sampling.max_new_tokens - sampled - 1
            self.check_pages(request, len(request.context))
        self.check_sharing()

    def check_sharing(self) -> None:
        """Rows with one prompt share the pages that it fills, and no rows share any other."""
        distinct = 0
        for key in {key_of(request) for request in self.running}:
            rows = [request for request in self.running if key_of(request) == key]
            full = len(rows[0].prompt) // self.case.page_size
            assert len({tuple(request.pages[:full]) for request in rows}) == 1, "a prompt is held twice"
            distinct += full + sum(len(request.pages) - full for request in rows)
        assert distinct == len({page for request in self.running for page in request.pages}), "a page is shared"

    def check_decode(self, plan: DecodeStep, before: dict, lacking: int) -> None:
        kept = [request for request in self.running if request.slot is not None]
        assert kept == self.running[: len(kept)], "another row than the youngest was preempted"
        if preempted := self.running[len(kept) :]:
            assert not self.in_flight, "a row was preempted before all its tokens were known"
            assert lacking > 0, "a row was preempted while there were pages"
            others = {page for request in kept for page in before[request.row][1]}
            given_back = len(set(before[preempted[0].row][1]) - others)
        self.running, self.queue = kept, preempted + self.queue
        if preempted:
            assert self.available() <= given_back, "more rows than needed were preempted"
        for request in kept:
            slot, pages = before[request.row]
            assert (request.slot, request.pages[: len(pages)]) == (slot, pages), "a running row was moved"
        step = self.going_on()
        assert plan.slots.tolist() == sorted(request.slot for request in step)
        assert plan.longest == max(self.position[request.row] for request in step) + 1
        self.check_clusters(plan, sorted(step, key=lambda request: request.slot))
        for request in step:
            self.position[request.row] += 1
            self.left[request.row] -= 1
            self.check_pages(request, self.position[request.row])
        self.check_sharing()

    def check_clusters(self, plan: DecodeStep, rows: list[Request]) -> None:
        """Of the rows with one prompt all but one at most are in clusters, which hold the pages that it fills."""
        clusters = NO_CLUSTERS if plan.clusters is None else plan.clusters
        if not self.case.cluster_rows:
            assert plan.clusters is None
            return
        alone = Counter(key_of(request) for request in rows if len(request.prompt) >= self.case.page_size)
        for members, tokens in zip(clusters.members, clusters.tokens, strict=True):
            cluster = [rows[member] for member in members if member >= 0]
            assert 2 <= len(set(map(id, cluster))) == len(cluster) <= self.case.cluster_rows
            assert {tokens} == {len(r.prompt) // self.case.page_size * self.case.page_size for r in cluster}
            pages = self.scheduler.slots.block_table[[r.slot for r in cluster], : tokens // self.case.page_size]
            assert (pages == pages[0]).all(), "a cluster holds other pages than it shares"
            alone -= Counter(map(key_of, cluster))
        assert not alone or max(alone.values()) == 1, "rows that share pages are not in a cluster"

    def check_pages(self, request: Request, tokens: int) -> None:
        """The request has pages for so many tokens, and nothing else stands in its row of the block table."""
        assert len(request.pages) == self.pages_for(tokens)
        row = self.scheduler.slots.block_table[request.slot].tolist()
        assert row == request.pages + [SCRATCH_PAGE] * (len(row) - len(request.pages))

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        for request in self.scheduler.commit(plan, result):
            self.done[request.row] += 1
            assert (request.slot, request.pages) == (None, [])
        self.scheduler.check()
        self.running = [request for request in self.running if not self.done[request.row]]

    def going_on(self) -> list[Request]:
        """The running requests that have a step left, as far as is known."""
        return [request for request in self.running if self.left[request.row]]

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.case.page_size)


@settings(steady, max_examples=250)
@given(cases())
def test_every_request_comes_to_its_end(case):
    """Guards against lost, doubled or mixed-up tokens, leaked pages and slots, and rows that never run."""
    drive = Drive(case).run()
    event(f"preemptions: {min(drive.scheduler.preemptions, 3)}")


@pytest.mark.parametrize("preemptions", [1, 3])
def test_generated_cases_preempt(preemptions):
    """Guards against cases so roomy that the test above never sees a preemption."""
    found = find(
        cases(),
        lambda case: Drive(case).run().scheduler.preemptions >= preemptions,
        settings=settings(steady, max_examples=400, phases=[Phase.generate]),
    )
    assert len(found.requests) > 1


def case_of(*requests: tuple[int, int], slots: int, page_size: int = 4, spare_pages: int = 99) -> Case:
    arguments = tuple({"prompt": prompt, "budget": budget} for prompt, budget in requests)
    return Case(arguments, slots, page_size, spare_pages)


def test_a_step_is_planned_only_for_rows_that_go_on():
    """Guards against a row that is fed behind its last page because its end is not known yet."""
    drive = Drive(Case(({"prompt": 4, "budget": 2}, {"prompt": 4, "budget": 6}), 2, 4, 99, ahead=3)).run()
    assert [len(plan.slots) for plan in drive.steps[1:]] == [2, 1, 1, 1, 1]


def groups_of(slots: int, *requests: tuple[int, int, int], page_size: int = 4, spare_pages: int = 99, ahead: int = 0):
    """A case of requests given as kind of the prompt, its length, and the budget."""
    arguments = tuple({"kind": kind, "prompt": prompt, "budget": budget} for kind, prompt, budget in requests)
    return Case(arguments, slots, page_size, spare_pages, ahead)


def admissions(drive: Drive) -> list[list[int]]:
    return [[request.row for request in plan.admitted] for plan in drive.steps if isinstance(plan, PrefillStep)]


def test_preempted_rows_keep_their_tokens():
    """Guards against a preempted row that starts again, or loses log-probabilities: the device compares both."""
    drive = Drive(case_of((4, 12), (4, 12), (4, 12), slots=3, spare_pages=2)).run()
    assert drive.scheduler.preemptions == 2
    assert admissions(drive) == [[0, 1, 2], [1], [2]]


def test_longest_budgets_run_first():
    """Guards against a long answer that starts last and runs alone, and against equal ones out of order."""
    drive = Drive(case_of((1, 2), (1, 9), (1, 5), (1, 9), (1, 5), slots=1)).run()
    assert admissions(drive) == [[1], [3], [2], [4], [0]]


def test_slots_are_refilled_a_quarter_at_once():
    """Guards against a prefill for every single slot that falls free."""
    short, long = (1, 2), (1, 20)
    drive = Drive(case_of(*[long] * 8, short, short, short, long, slots=8)).run()
    assert admissions(drive) == [[0, 1, 2, 3, 4, 5, 6, 7], [11, 8, 9, 10]]
    requests = [(1, 30)] * 6 + [(1, 29), (1, 28)] + [(1, 5)] * 3
    drive = Drive(case_of(*requests, slots=8)).run()
    # Row 7 leaves a slot after 28 tokens; it waits for that of row 6, one step later.
    steps = [isinstance(plan, PrefillStep) for plan in drive.steps]
    assert steps.index(True, 1) == 29
    assert admissions(drive) == [list(range(8)), [8, 9], [10]]


def test_the_last_request_does_not_wait_for_a_quarter():
    """Guards against a last request that waits for company that never comes."""
    drive = Drive(case_of(*[(1, 30)] * 7, (1, 10), (1, 9), slots=8)).run()
    steps = [isinstance(plan, PrefillStep) for plan in drive.steps]
    assert steps.index(True, 1) == 10


def test_no_request_overtakes_one_that_waits_for_pages():
    """Guards against short prompts that keep a long one waiting for ever."""
    drive = Drive(case_of((9, 9), (20, 8), (1, 7), slots=2, page_size=4, spare_pages=0)).run()
    assert admissions(drive)[:2] == [[0], [1, 2]]


def test_a_stop_string_ends_a_row_at_its_last_token():
    """Guards against strings that are searched too late, in the wrong row, or after the slot's next request."""
    text = "".join(LETTERS[token_at(0, position)] for position in range(3, 40))
    stop = text[4:7]
    end = text.index(stop) + 3
    arguments = (
        {"prompt": 3, "budget": 30, "stop": ("zz", stop)},
        {"prompt": 3, "budget": 30},
        {"prompt": 2, "budget": 6},
    )
    drive = Drive(Case(arguments, slots=2, page_size=4, spare_pages=99)).run()
    ended = Ending.reached(drive.requests[0])
    assert (len(ended.tokens), ended.finish_reason, ended.stop) == (end, "stop", stop)
    assert {drive.requests[row].finish_reason for row in (1, 2)} == {"length"}


def test_a_stop_string_counts_before_the_stop_token_that_completes_it():
    """Guards against a row that finishes twice in one step."""
    last = token_at(0, 2)
    arguments = ({"prompt": 2, "budget": 5, "stop_token_ids": (last,), "stop": (LETTERS[last],)},)
    drive = Drive(Case(arguments, slots=1, page_size=4, spare_pages=0)).run()
    assert drive.requests[0].stop == LETTERS[last]


@pytest.mark.parametrize("kind", ["stop", "stop_token_ids"])
def test_a_slot_is_refilled_while_steps_of_its_last_row_are_in_flight(kind):
    """Guards against tokens that a step launched too late gives to the next row of the slot."""
    stop = token_at(0, 4)
    first = {"prompt": 3, "budget": 30, kind: (LETTERS[stop] if kind == "stop" else stop,)}
    drive = Drive(Case((first, {"prompt": 2, "budget": 8}), slots=1, page_size=2, spare_pages=0, ahead=3)).run()
    # The prefill of the first row and its one decode step, then three of them too many.
    assert len(drive.requests[0].tokens) == 2
    assert [isinstance(step, PrefillStep) for step in drive.steps[:7]] == [1, 0, 0, 0, 0, 1, 0]


def test_stop_strings_need_a_search():
    """Guards against stop strings that are silently ignored."""
    request = make_request(0, 2, 5, stop=("a",))
    scheduler = Scheduler([request], slots=1, allocator=PageAllocator(9), page_size=4)
    plan = scheduler.plan()
    with pytest.raises(ValueError, match="cannot search"):
        scheduler.commit(plan, FakeDevice(4).run(plan, scheduler))


def test_the_token_of_an_idle_row_means_nothing():
    """Guards against what a frozen row reports being taken for a part of its response."""
    scheduler = Scheduler([make_request(0, 2, 3)], slots=1, allocator=PageAllocator(9), page_size=4)
    device = FakeDevice(4)
    for step in range(3):
        plan = scheduler.plan()
        result = device.run(plan, scheduler)
        if step == 1:
            idle = StepResult(np.array([-1]), np.array([Outcome.IDLE]), np.array([np.nan], np.float32))
            assert scheduler.commit(plan, idle) == []
        else:
            finished = scheduler.commit(plan, result)
    assert finished[0].tokens.tolist() == [token_at(0, 2), token_at(0, 4)]


def test_a_plan_is_committed_once():
    """Guards against tokens that land in the slot of another request."""
    scheduler = Scheduler([make_request(0, 2, 1)], slots=1, allocator=PageAllocator(9), page_size=4)
    plan = scheduler.plan()
    result = FakeDevice(4).run(plan, scheduler)
    scheduler.commit(plan, result)
    with pytest.raises(ValueError, match="not in flight"):
        scheduler.commit(plan, result)


def test_no_requests():
    """Guards against an empty call that waits."""
    assert Scheduler([], slots=2, allocator=PageAllocator(3), page_size=4).plan() is None


def damage_table(scheduler, rows):
    scheduler.slots.block_table[rows[0].slot, 0] = 7


def damage_pages(scheduler, rows):
    rows[0].pages[0] = rows[1].pages[0]


def damage_coverage(scheduler, rows):
    scheduler.slots._covered[rows[0].slot] -= 1


def damage_slots(scheduler, rows):
    scheduler.slots._free.append(rows[0].slot)


def lose_a_page(scheduler, rows):
    scheduler._allocator._free.pop()


@pytest.mark.parametrize("damage", [damage_table, damage_pages, damage_coverage, damage_slots, lose_a_page])
def test_check_sees_damage(damage):
    """Guards against a check that passes whatever it is given."""
    rows = [make_request(0, 5, 5), make_request(1, 5, 5)]
    scheduler = Scheduler(rows, slots=3, allocator=PageAllocator(9), page_size=4)
    scheduler.plan()
    scheduler.check()
    damage(scheduler, rows)
    with pytest.raises(AssertionError):
        scheduler.check()
