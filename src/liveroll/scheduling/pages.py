"""Which pages of KV storage are taken, and how many hold each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from liveroll.errors import KVMemoryError

SCRATCH_PAGE = 0
"""Padding and idle rows write their keys and values here; no request ever owns it."""


class PageAllocator:
    """Hands out page numbers `1 .. pages - 1`; page 0 is the scratch page.

    A page that is shared is given back by every holder, and free when the last has done so.

    Args:
        pages: pages in the storage, the scratch page included.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, SCRATCH_PAGE, -1))
        self._holders = [0] * pages
        self.peak = 0

    @property
    def available(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages.

        Raises:
            KVMemoryError: fewer are available; none is taken.
        """
        if count > len(self._free):
            raise KVMemoryError(f"{count} KV pages were asked for and {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        self.peak = max(self.peak, self.pages - 1 - len(self._free))
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages that others hold already.

        Raises:
            ValueError: a page is not taken; none is shared.
        """
        self._refuse_strays(pages, "shared")
        for page in pages:
            self._holders[page] += 1

    def deallocate(self, pages: Sequence[int]) -> None:
        """Give pages back, each once.

        Raises:
            ValueError: a page is not taken; nothing is given back.
        """
        self._refuse_strays(pages, "given back")
        for page in pages:
            self._holders[page] -= 1
        self._free.extend(page for page in pages if not self._holders[page])

    def check(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless every page is free or held by as many as counted.

        Args:
            held: the pages of every holder, one after the other.
        """
        counts, free = Counter(held), set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        for page in range(self.pages):
            taken = page == SCRATCH_PAGE or counts[page] > 0
            assert self._holders[page] == counts[page], f"page {page} is held by others than counted"
            assert not (taken and page in free), f"page {page} is free and taken"
            assert taken or page in free, f"page {page} is lost"

    def _refuse_strays(self, pages: Sequence[int], what: str) -> None:
        if not pages:
            return
        exist = min(pages) > SCRATCH_PAGE and max(pages) < self.pages
        if not exist or not all(map(self._holders.__getitem__, pages)) or len(set(pages)) != len(pages):
            raise ValueError(f"pages {list(pages)} were {what} without being taken")
