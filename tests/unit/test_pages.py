"""Every page is free, or held by as many as hold it, whatever is asked of the allocator."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from liveroll.errors import KVMemoryError
from liveroll.scheduling.pages import SCRATCH_PAGE, PageAllocator


class Allocations(RuleBasedStateMachine):
    """Guards against pages that get lost, are handed out while held, or change hands in a call that is refused."""

    @initialize(pages=st.integers(1, 12))
    def start(self, pages):
        self.allocator = PageAllocator(pages)
        self.held: Counter[int] = Counter()
        self.peak = 0

    @rule(data=st.data())
    def allocate(self, data):
        count = data.draw(st.integers(0, self.allocator.available))
        taken = self.allocator.allocate(count)
        assert len(set(taken)) == count
        assert not set(taken) & set(self.held)
        assert SCRATCH_PAGE not in taken
        self.held.update(taken)
        self.peak = max(self.peak, len(self.held))

    @rule(data=st.data())
    def share(self, data):
        pages = self.some_held(data)
        self.allocator.share(pages)
        self.held.update(pages)

    @rule(data=st.data())
    def deallocate(self, data):
        pages = self.some_held(data)
        self.allocator.deallocate(pages)
        self.held -= Counter(pages)

    def some_held(self, data):
        return data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True) if self.held else st.just([]))

    @rule(excess=st.integers(1, 5))
    def ask_for_too_many(self, excess):
        before = copy.deepcopy(vars(self.allocator))
        with pytest.raises(KVMemoryError, match=f"{self.allocator.available} are free"):
            self.allocator.allocate(self.allocator.available + excess)
        assert vars(self.allocator) == before

    @rule(data=st.data())
    def name_what_is_not_taken(self, data):
        free = sorted({SCRATCH_PAGE, -1, self.allocator.pages, *range(1, self.allocator.pages)} - set(self.held))
        self.refuse([*self.held, data.draw(st.sampled_from(free))])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def name_a_page_twice(self, data):
        self.refuse([*self.held, data.draw(st.sampled_from(sorted(self.held)))])

    def refuse(self, pages):
        before = copy.deepcopy(vars(self.allocator))
        with pytest.raises(ValueError, match="given back without being taken"):
            self.allocator.deallocate(pages)
        with pytest.raises(ValueError, match="shared without being taken"):
            self.allocator.share(pages)
        assert vars(self.allocator) == before

    @invariant()
    def counts_agree(self):
        self.allocator.check(self.held.elements())
        assert self.allocator.available + len(self.held) == self.allocator.pages - 1
        assert all(self.allocator.holders(page) == self.held[page] for page in range(self.allocator.pages))
        assert self.allocator.peak == self.peak


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)


def test_peak_counts_pages_in_use_at_once():
    """Guards against a peak that adds up allocations."""
    allocator = PageAllocator(8)
    for _ in range(3):
        allocator.deallocate(allocator.allocate(4))
    assert allocator.peak == 4


def test_a_shared_page_is_free_when_its_last_holder_gives_it_back():
    """Guards against a page that is handed out while another row still reads it."""
    allocator = PageAllocator(2)
    (page,) = allocator.allocate(1)
    allocator.share([page])
    allocator.deallocate([page])
    assert allocator.available == 0
    allocator.deallocate([page])
    assert allocator.available == allocator.peak == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a, page: a._free.append(a._free[0]), "free twice"),
        (lambda a, page: a._free.append(page), "free and taken"),
        (lambda a, page: a._free.pop(), "is lost"),
        (lambda a, page: a._free.append(SCRATCH_PAGE), "free and taken"),
        (lambda a, page: a.share([page]), "than counted"),
        (lambda a, page: a.deallocate([page]), "than counted"),
    ],
)
def test_check_sees_damage(damage, message):
    """Guards against a check that passes whatever it is given."""
    allocator = PageAllocator(6)
    held = allocator.allocate(2)
    allocator.check(held)
    damage(allocator, held[0])
    with pytest.raises(AssertionError, match=message):
        allocator.check(held)
