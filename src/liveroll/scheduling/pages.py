"""Which pages of KV storage are taken."""

from __future__ import annotations

from liveroll.errors import KVMemoryError

SCRATCH_PAGE = 0
"""Padding and idle rows write their keys and values here; no request ever owns it."""


class PageAllocator:
    """Hands out page numbers `1 .. pages - 1`; page 0 is the scratch page.

    Args:
        pages: pages in the storage, the scratch page included.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, SCRATCH_PAGE, -1))
        self._taken: set[int] = set()
        self.peak = 0

    @property
    def available(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages.

        Raises:
            KVMemoryError: fewer are available; none is taken.
        """
        if count > len(self._free):
            raise KVMemoryError(f"{count} KV pages were asked for and {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        self._taken.update(taken)
        self.peak = max(self.peak, len(self._taken))
        return taken

    def deallocate(self, pages: list[int]) -> None:
        """Give pages back.

        Raises:
            ValueError: a page is not taken; nothing is given back.
        """
        stray = [page for page in pages if page not in self._taken]
        if stray or len(set(pages)) != len(pages):
            raise ValueError(f"pages {stray or pages} were given back without being taken")
        self._taken.difference_update(pages)
        self._free.extend(pages)

    def check(self) -> None:
        """Raise AssertionError unless every page is either free or taken, once."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & self._taken, "a page is free and taken"
        assert free | self._taken == set(range(SCRATCH_PAGE + 1, self.pages)), "a page is lost"
