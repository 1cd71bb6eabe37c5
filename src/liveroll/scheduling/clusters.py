"""Which rows of a decode step hold the same pages of a prompt, so that attention may read these once for several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from liveroll.scheduling.request import Request


@dataclass(frozen=True)
class Clusters:
    """Rows of a step that begin with the same pages, a few together; no row is in two clusters.

    Attributes:
        members: `[C, M]` int32 rows of the step, at least two in a cluster; -1 behind the last.
        tokens: `[C]` int32 tokens in the pages that the rows of a cluster share: the first ones of each.
    """

    members: np.ndarray
    tokens: np.ndarray

    @property
    def spared(self) -> int:
        """Tokens whose keys are not read again, where those that a cluster shares are read once."""
        return int(((self.members >= 0).sum(1) - 1) @ self.tokens)


NO_CLUSTERS = Clusters(np.empty((0, 1), np.int32), np.empty(0, np.int32))


class ClusterFinder:
    """Finds the clusters of step after step.

    Args:
        page_size: tokens in a page.
        most: rows of a cluster.
        least_spared: tokens whose keys the clusters of a step must spare it to read again.
    """

    def __init__(self, page_size: int, most: int, least_spared: int) -> None:
        self._page_size = page_size
        self._most = most
        self._least_spared = least_spared
        self._tenants = np.empty((2, 0), np.int64)
        self._found: Clusters | None = None

    def find(self, slots: np.ndarray, tenancies: np.ndarray, running: Mapping[int, Request]) -> Clusters | None:
        """The clusters of a step, the same object while its rows are the same; None where they would spare too little.

        Args:
            slots: int64 slots of its rows.
            tenancies: int64, which tenant of each slot its row is.
            running: the request on each slot.
        """
        tenants = np.stack([slots, tenancies])
        if not np.array_equal(tenants, self._tenants):
            found = find_clusters([running[slot] for slot in slots.tolist()], self._page_size, self._most)
            self._found = found if found.spared >= self._least_spared else None
            self._tenants = tenants
        return self._found


def find_clusters(requests: Sequence[Request], page_size: int, most: int) -> Clusters:
    """The clusters among requests, given in the order of their rows, of `most` rows at most."""
    sharing: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        if len(request.prompt) >= page_size:
            sharing.setdefault(request.pages[0], []).append(row)
    found = [part for rows in sharing.values() for part in _parts(rows, most) if len(part) > 1]
    members = np.full((len(found), most), -1, np.int32)
    for cluster, rows in enumerate(found):
        members[cluster, : len(rows)] = rows
    # Who has the first page of a prompt has all that the prompt fills.
    tokens = [len(requests[rows[0]].prompt) // page_size * page_size for rows in found]
    return Clusters(members, np.array(tokens, np.int32))


def _parts(rows: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """Rows in as few parts as there must be, of about one size."""
    count = -(-len(rows) // most)
    for part in range(count):
        yield rows[part * len(rows) // count : (part + 1) * len(rows) // count]
