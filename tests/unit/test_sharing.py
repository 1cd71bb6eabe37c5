"""Requests with one prompt run it once and share its pages; nothing that one of them writes reaches another."""

from __future__ import annotations

import pytest
from fake_device import Ending, FakeDevice, ending_of, make_request, token_at

from liveroll.scheduling.pages import PageAllocator
from liveroll.scheduling.plan import PrefillStep
from liveroll.scheduling.request import Request
from liveroll.scheduling.scheduler import Scheduler


class Run:
    """A call run to its end on a device that checks every key a row attends to.

    Attributes:
        prefills: the prefill steps, in order.
        borrowed: of every admission, how many pages the request took over, by row.
    """

    def __init__(self, requests: list[Request], *, slots: int, pages: int = 999, page_size: int = 4) -> None:
        self.requests = requests
        self.allocator = PageAllocator(1 + pages)
        self.scheduler = Scheduler(requests, slots=slots, allocator=self.allocator, page_size=page_size)
        self.prefills: list[PrefillStep] = []
        self.borrowed: dict[int, list[int]] = {request.row: [] for request in requests}
        endings = [ending_of(request) for request in requests]
        device = FakeDevice(page_size)
        while (plan := self.scheduler.plan()) is not None:
            self.scheduler.check()
            if isinstance(plan, PrefillStep):
                self.prefills.append(plan)
                for request in plan.admitted:
                    self.borrowed[request.row].append(request.borrowed)
            self.scheduler.commit(plan, device.run(plan, self.scheduler))
            self.scheduler.check()
        assert [Ending.reached(request) for request in requests] == endings
        assert self.allocator.available == pages

    @property
    def admissions(self) -> list[list[int]]:
        """Rows of each admission."""
        return [[request.row for request in plan.admitted] for plan in self.prefills]

    @property
    def run_rows(self) -> list[int]:
        """Rows whose contexts were run, in order."""
        return [
            request.row
            for plan in self.prefills
            for index, (request, source) in enumerate(zip(plan.admitted, plan.sources, strict=True))
            if index == source
        ]

    @property
    def copies(self) -> list[tuple[int, int]]:
        """All copies of pages, in order."""
        return [pair for plan in self.prefills for pair in plan.copies]


def group(count: int, prompt: int, budget: int) -> list[Request]:
    return [make_request(row, prompt, budget, kind=0) for row in range(count)]


def stopping(row: int, kind: int, prompt: int, after: int) -> Request:
    """A request that may generate 40 tokens and stops early."""
    return make_request(row, prompt, 40, kind=kind, stop_token_ids=(token_at(row, prompt + after - 1),))


def test_a_long_prompt_is_held_once():
    """Guards against a prompt that takes its pages once a sample."""
    run = Run(group(16, 2000, 33), slots=16, page_size=16)
    assert run.run_rows == [0]
    assert run.scheduler.shared_tokens == 15 * 2000
    # Of 33 tokens the last is not fed back, and 2000 is 125 pages.
    assert run.allocator.peak == 125 + 16 * 2
    assert run.copies == []


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("prompt", [1, 3, 4, 15, 16, 17])
def test_a_last_page_that_is_not_full_is_copied(prompt, page_size):
    """Guards against rows that write behind the prompt into one page, and against copies nobody needs."""
    run = Run(group(5, prompt, 6), slots=5, page_size=page_size)
    full, rest = divmod(prompt, page_size)
    assert run.run_rows == [0]
    assert len(run.copies) == (4 if rest else 0)
    assert len({old for old, _ in run.copies}) == bool(rest)
    assert len({new for _, new in run.copies}) == len(run.copies)
    assert run.allocator.peak == full + 5 * (-(-(prompt + 5) // page_size) - full)


@pytest.mark.parametrize("prompt", [6, 8])
def test_samples_that_wait_for_a_slot_need_no_forward(prompt):
    """Guards against a prompt, or the logits behind it, forgotten while samples of it wait."""
    run = Run(group(7, prompt, 5), slots=2)
    assert run.run_rows == [0]
    assert run.admissions == [[0, 1], [2, 3], [4, 5], [6]]
    assert [len(plan.kept) for plan in run.prefills] == [1, 1, 1, 0]
    # A last page that no row writes to any more goes on as the next one's; only its neighbour needs a copy.
    assert [len(plan.copies) for plan in run.prefills] == ([1, 1, 1, 0] if prompt == 6 else [0, 0, 0, 0])
    assert run.allocator.peak == 1 + 2 * 2 if prompt == 6 else 2 + 2


def test_prompts_are_shared_across_the_call():
    """Guards against sharing by place in the call, and against samples with other budgets that are left out."""
    requests = [
        make_request(row, 6, budget, kind=kind)
        for row, (kind, budget) in enumerate([(0, 3), (1, 9), (2, 9), (0, 9), (1, 9)])
    ]
    run = Run(requests, slots=2)
    assert run.run_rows == [3, 1, 2]
    # The largest budgets first; of equal ones, those of one prompt together, in the order of the prompts.
    assert [row for rows in run.admissions for row in rows] == [3, 1, 4, 2, 0]


def test_a_sample_that_needs_no_forward_takes_a_slot_at_once():
    """Guards against a slot that stays empty until a quarter of them is, though nothing has to be run."""
    first = [stopping(0, 0, 4, after=3), *(make_request(row, 4, 40, kind=0) for row in range(1, 8))]
    run = Run([*first, make_request(8, 4, 30, kind=0), make_request(9, 4, 29, kind=1)], slots=8)
    assert run.admissions == [list(range(8)), [8], [9]]
    assert run.run_rows == [0, 9]


@pytest.mark.parametrize(("pages", "run_again"), [(20, []), (19, [5]), (18, [4, 5])])
def test_what_is_needed_last_is_given_up_first(pages, run_again):
    """Guards against more prompts given up than needed, the wrong ones, and rows preempted for their sake."""
    requests = [
        stopping(0, 0, 4, after=2),
        stopping(1, 1, 4, after=2),
        make_request(2, 4, 30),
        make_request(3, 4, 30),
        make_request(4, 4, 3, kind=0),
        make_request(5, 4, 2, kind=1),
    ]
    # Two rows of 33 keys take 9 pages each while the prompts of the first two, of a page each, are kept.
    run = Run(requests, slots=2, pages=pages)
    assert run.run_rows == [0, 1, 2, 3, *run_again]
    assert run.scheduler.preemptions == 0


@pytest.mark.parametrize(("pages", "run_again"), [(19, False), (18, True)])
def test_a_last_page_is_given_up_alone(pages, run_again):
    """Guards against the pages that running rows share being forgotten: giving them up would free nothing."""
    requests = [
        stopping(0, 0, 6, after=2),
        make_request(1, 6, 39, kind=0),
        make_request(2, 4, 30),
        make_request(3, 6, 3, kind=0),
    ]
    # 9 pages each for rows 1 and 2 when row 2 ends, and the prompt's last one, which no row writes to once row 0 has
    # stopped.
    run = Run(requests, slots=2, pages=pages)
    assert (3 in run.run_rows) == run_again
    assert run.borrowed[3] == [1 if run_again else 2]
    assert run.scheduler.preemptions == 0


def test_what_a_running_row_holds_is_not_given_up():
    """Guards against a prompt that is run again though giving it up freed nothing."""
    requests = [
        make_request(0, 6, 40, kind=0),
        stopping(1, 1, 6, after=2),
        make_request(2, 4, 30),
        make_request(3, 6, 4, kind=1),
        make_request(4, 6, 3, kind=0),
    ]
    # 9 pages each for rows 0 and 2: none is left for the prompt of row 1, which is needed before that of row 0.
    run = Run(requests, slots=2, pages=18)
    assert run.run_rows == [0, 1, 2, 3]


def test_one_row_alone_may_fill_the_storage():
    """Guards against a call that stands still because what is kept for later leaves too little for now."""
    for prompt in range(1, 10):
        for budget in (1, 2, 6):
            run = Run(group(3, prompt, budget), slots=3, pages=-(-(prompt + budget - 1) // 4))
            assert run.run_rows[0] == 0


def test_a_row_that_comes_back_shares_the_full_pages():
    """Guards against a preempted sample that takes the whole prompt again, or that writes to what others read."""
    run = Run(group(3, 10, 12), slots=3, pages=9)
    assert run.scheduler.preemptions > 0
    back = [borrowed[1:] for borrowed in run.borrowed.values() if len(borrowed) > 1]
    assert back
    assert all(pages == 2 for row in back for pages in row)
    assert len(run.run_rows) == 1 + len(back)


def test_logits_behind_a_response_are_not_those_of_the_prompt():
    """Guards against a first token drawn from what a row that came back ended with: the device checks each source."""
    continued = make_request(0, 6, 22, kind=0, given=(1, 1))
    fresh = [make_request(row, 6, 19, kind=0) for row in (1, 2)]
    allocator = PageAllocator(99)
    scheduler = Scheduler([continued, *fresh], slots=3, allocator=allocator, page_size=4)
    plan = scheduler.plan()
    assert plan.sources == (0, 1, 1)
    assert [request.borrowed for request in plan.admitted] == [0, 1, 1]


def test_check_sees_damage():
    """Guards against a check that passes whatever it is given."""
    for damage in (
        lambda sharing, queue: sharing._kept.clear(),
        lambda sharing, queue: queue.pop(),
        lambda sharing, queue: next(iter(sharing._kept.values())).pages.append(9),
        lambda sharing, queue: sharing._waiting.subtract([queue[0].group]),
    ):
        scheduler = Scheduler(group(3, 6, 5), slots=1, allocator=PageAllocator(99), page_size=4)
        scheduler.plan()
        scheduler.check()
        damage(scheduler._sharing, scheduler._waiting)
        with pytest.raises(AssertionError):
            scheduler.check()
