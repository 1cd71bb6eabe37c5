"""How ranks that run one call divide its requests: a hand for each to begin with, and chunks to take later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from liveroll.scheduling.request import Request

Source = Callable[[], Sequence[Request]]
"""Gives the next requests to run, in the order of their admission; none when there are no more."""


@dataclass(frozen=True)
class Deal:
    """Who runs what.

    Attributes:
        hands: requests that each rank begins with.
        chunks: the others, to be taken one chunk after the other by whichever rank has slots free.
    """

    hands: tuple[tuple[Request, ...], ...]
    chunks: tuple[tuple[Request, ...], ...] = ()


def deal(requests: Sequence[Request], ranks: int, slots: int, refill: int) -> Deal:
    """Divide requests among ranks of which none knows how long its own will take.

    Each is dealt an even share, no more than it has slots for, so that a call that fits all slots needs no queue. Of
    what is left over, a chunk is half an even share of what its predecessors leave, so chunks shrink to single requests
    and the last of them end together: guided self-scheduling (Polychronopoulos and Kuck 1987,
    doi:10.1109/TC.1987.5009495), with chunks half as large because lengths differ a lot, as in factoring (Hummel,
    Schonberg and Flynn 1992, doi:10.1145/135226.135232). No chunk is larger than `refill`, so whoever takes one has
    the slots for it. Samples of a prompt stay together as far as these sizes allow.

    Args:
        requests: in the order of their admission.
        ranks: how many there are.
        slots: rows that each runs side by side.
        refill: slots that a rank has free when it asks for more.
    """
    share = min(slots, -(-len(requests) // ranks))
    bundles = deque(_bundles(requests, share))
    hands: list[list[Request]] = [[] for _ in range(ranks)]
    while bundles and any(len(hand) + len(bundles[0]) <= share for hand in hands):
        # Like cards, so that requests of like length, which lie together, come to different ranks.
        for hand in hands:
            if bundles and len(hand) + len(bundles[0]) <= share:
                hand.extend(bundles.popleft())
    rest = [request for bundle in bundles for request in bundle]
    return Deal(tuple(map(tuple, hands)), tuple(_chunks(rest, ranks, refill)))


def _bundles(requests: Sequence[Request], most: int) -> list[list[Request]]:
    """Neighbours of one prompt, at most so many in each bundle."""
    bundles: list[list[Request]] = []
    for request in requests:
        if bundles and bundles[-1][0].group == request.group and len(bundles[-1]) < most:
            bundles[-1].append(request)
        else:
            bundles.append([request])
    return bundles


def _chunks(requests: Sequence[Request], ranks: int, most: int) -> list[tuple[Request, ...]]:
    chunks = []
    start = 0
    while start < len(requests):
        left = len(requests) - start
        end = start + min(most, -(-left // (2 * ranks)))
        last = min(start + most, len(requests))
        while end < last and requests[end].group == requests[end - 1].group:
            end += 1
        chunks.append(tuple(requests[start:end]))
        start = end
    return chunks
