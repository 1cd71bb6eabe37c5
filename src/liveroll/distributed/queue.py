"""The queue from which the ranks of a group take requests."""

from __future__ import annotations

from collections.abc import Sequence

from liveroll.distributed.control import Control
from liveroll.scheduling.request import Request
from liveroll.scheduling.shares import Deal


class SharedQueue:
    """A source for this rank's scheduler: its hand, then whatever chunk is next for anybody.

    Every rank knows all chunks, so that the queue itself is one number in the store of the group.

    Args:
        control: of the call.
        deal: the same on every rank.
    """

    def __init__(self, control: Control, deal: Deal) -> None:
        self._control = control
        self._hand = deal.hands[control.rank]
        self._chunks = deal.chunks

    def __call__(self) -> Sequence[Request]:
        """The next requests to run; none when there are no more."""
        if self._hand:
            hand, self._hand = self._hand, ()
            return hand
        if not self._chunks:
            return ()
        number = self._control.take_number()
        return self._chunks[number] if number < len(self._chunks) else ()
