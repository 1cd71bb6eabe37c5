"""Every page is free or taken, once, whatever is asked of the allocator."""

from __future__ import annotations

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from liveroll.errors import KVMemoryError
from liveroll.scheduling.pages import SCRATCH_PAGE, PageAllocator


class Allocations(RuleBasedStateMachine):
    """Guards against pages that get lost, are handed out twice, or change hands in a call that is refused."""

    @initialize(pages=st.integers(1, 12))
    def start(self, pages):
        self.allocator = PageAllocator(pages)
        self.held: list[int] = []
        self.peak = 0

    @rule(data=st.data())
    def allocate(self, data):
        count = data.draw(st.integers(0, self.allocator.available))
        taken = self.allocator.allocate(count)
        assert len(taken) == count
        assert not set(taken) & set(self.held)
        assert SCRATCH_PAGE not in taken
        self.held += taken
        self.peak = max(self.peak, len(self.held))

    @rule(data=st.data())
    def deallocate(self, data):
        given = data.draw(st.lists(st.sampled_from(self.held), unique=True) if self.held else st.just([]))
        self.allocator.deallocate(given)
        self.held = [page for page in self.held if page not in given]

    @rule(excess=st.integers(1, 5))
    def ask_for_too_many(self, excess):
        before = copy.deepcopy(vars(self.allocator))
        with pytest.raises(KVMemoryError, match=f"{self.allocator.available} are free"):
            self.allocator.allocate(self.allocator.available + excess)
        assert vars(self.allocator) == before

    @rule(data=st.data())
    def give_back_what_is_not_taken(self, data):
        free = sorted({SCRATCH_PAGE, self.allocator.pages, *range(1, self.allocator.pages)} - set(self.held))
        self.refuse([*self.held, data.draw(st.sampled_from(free))])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back_twice(self, data):
        self.refuse([*self.held, data.draw(st.sampled_from(self.held))])

    def refuse(self, pages):
        before = copy.deepcopy(vars(self.allocator))
        with pytest.raises(ValueError, match="given back without being taken"):
            self.allocator.deallocate(pages)
        assert vars(self.allocator) == before

    @invariant()
    def counts_agree(self):
        self.allocator.check()
        assert self.allocator.available + len(self.held) == self.allocator.pages - 1
        assert self.allocator.peak == self.peak


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)


def test_peak_counts_pages_in_use_at_once():
    """Guards against a peak that adds up allocations."""
    allocator = PageAllocator(8)
    for _ in range(3):
        allocator.deallocate(allocator.allocate(4))
    assert allocator.peak == 4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: a._free.append(a._free[0]), "free twice"),
        (lambda a: a._taken.add(a._free[0]), "free and taken"),
        (lambda a: a._free.pop(), "lost"),
        (lambda a: a._free.append(SCRATCH_PAGE), "lost"),
    ],
)
def test_check_sees_damage(damage, message):
    """Guards against a check that passes whatever it is given."""
    allocator = PageAllocator(6)
    allocator.allocate(2)
    allocator.check()
    damage(allocator)
    with pytest.raises(AssertionError, match=message):
        allocator.check()
