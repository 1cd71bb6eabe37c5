"""What ranks tell one another during a call, through the store of their group: who came, who failed, what is next.

Collectives cannot be left once they are entered, so all ranks meet here before each. Whoever waits here learns that
another rank failed or does not come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

from torch import distributed as dist
from torch.distributed import ProcessGroup

from liveroll.distributed.agreement import name_ranks
from liveroll.distributed.lent import is_destroyed
from liveroll.errors import ConfigError, RankError

_BEAT = 2.0
"""Seconds between signs of life of a rank that runs, at most."""

_PAUSES = (5e-4, 0.5)
"""Seconds between two looks of a rank that waits, at least and at most; in between a twentieth of what it waited."""


@dataclass
class _Calls:
    """Calls of a group so far, as one of its ranks counts them.

    Attributes:
        made: how many.
        forgotten: how many of them the store holds nothing of any more.
        blamed: whether the last one failed because of this rank, in the eyes of all.
    """

    made: int = 0
    forgotten: int = 0
    blamed: bool = False


_calls: WeakKeyDictionary[ProcessGroup, _Calls] = WeakKeyDictionary()


def check_group(group: Any) -> ProcessGroup | None:
    """The group, or None where this rank has it to itself.

    Raises:
        ConfigError: it is no process group, or one that was destroyed, or this rank is not in it.
    """
    if group is None:
        return None
    not_here = "this rank is not in the group; only the ranks of a group may call generate with it"
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(not_here)
    if not isinstance(group, ProcessGroup):
        raise ConfigError(f"group must be a process group of torch.distributed, not a {type(group).__name__}")
    if is_destroyed(group):
        raise ConfigError("the group has been destroyed by destroy_process_group; give the one that is used now")
    if dist.get_rank(group) < 0:
        raise ConfigError(not_here)
    return group if group.size() > 1 else None


class Control:
    """One call of a group, as one of its ranks sees it. All ranks make their calls in the same order.

    Args:
        group: the group.
        patience: seconds without a sign of life of any rank after which those that are waited for count as lost.
    """

    def __init__(self, group: ProcessGroup, patience: float) -> None:
        self._store = group.get_group_store()
        self.rank, self.ranks = group.rank(), group.size()
        self._patience = patience
        self._calls = _calls.setdefault(group, _Calls())
        self._calls.made += 1
        # Whoever has left a call out is late for each one after it. Having raised once it joins the others.
        while self._calls.blamed and self.rank in self._failure(self._calls.made)[1]:
            self._calls.made += 1
        self._number = self._calls.made
        self._pace = min(_BEAT, patience / 4)
        self._last_beat = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.blamed = isinstance(error, RankError) and self.rank in error.ranks
        if error is None:
            return
        if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
            raise RankError(
                f"the store of the group is out of reach ({error}); the process that keeps it has ended, which is that "
                "of rank 0 or the launcher, and what it raised says why",
                (),
            ) from error
        if not isinstance(error, RankError):
            told = f"rank {self.rank} of the group failed, and so does the call: {type(error).__name__}: {error}"
            error = RankError(told, (self.rank,))
        # A store that is gone must not hide what happened, and of several failures the first is told.
        with suppress(dist.DistError):
            self._store.compare_set(self._key("failed"), "", json.dumps([str(error), error.ranks]))
            self._linger(error.ranks)

    def _linger(self, blamed: Sequence[int]) -> None:
        """Wait a little for the others to hear of a failure, since the store may end with this process."""
        heard_by = self.ranks - len(set(blamed) - {self.rank})
        end = time.monotonic() + min(self._pace + _PAUSES[1], self._patience / 2)
        self._store.add(self._key("heard"), 1)
        while self._store.add(self._key("heard"), 0) < heard_by and time.monotonic() < end:
            time.sleep(_PAUSES[1] / 10)

    def meet(self, place: str) -> None:
        """Wait until every rank is here.

        Raises:
            RankError: a rank failed, or does not come.
        """
        self._store.set(f"liveroll/rank {self.rank}", f"{self._number} {place}")
        if self._store.add(self._key(place), 1) == self.ranks:
            self._store.set(self._key(place, "open"), "")
        started = seen = time.monotonic()
        beats = -1
        while True:
            self._raise_failure()
            if self._store.check([self._key(place, "open")]):
                break
            now = time.monotonic()
            if now - seen > self._patience or beats < 0:
                before, beats, seen = beats, self._store.add(self._key("beats"), 0), now
                if before == beats:
                    self._raise_missing(place)
            time.sleep(min(max((now - started) / 20, _PAUSES[0]), _PAUSES[1]))
        if self.rank == 0 and place == "start":
            self._forget()

    def take_number(self) -> int:
        """The next number of the call, counted from 0, that no other rank was given."""
        return int(self._store.add(self._key("numbers"), 1)) - 1

    def beat(self) -> None:
        """Give a sign of life, if it is time for one, and look for the failure of another rank.

        Raises:
            RankError: a rank failed.
        """
        if time.monotonic() - self._last_beat >= self._pace:
            self._raise_failure()
            self._store.add(self._key("beats"), 1)
            self._last_beat = time.monotonic()

    def _raise_failure(self) -> None:
        message, ranks = self._failure(self._number)
        if ranks:
            raise RankError(message, tuple(ranks))

    def _failure(self, number: int) -> tuple[str, list[int]]:
        """What is told of the failure of a call, and the ranks that it names; none where it has not failed."""
        key = f"liveroll/{number}/failed"
        if not self._store.check([key]):
            return "", []
        message, ranks = json.loads(self._store.get(key))
        return message, ranks

    def _raise_missing(self, place: str) -> None:
        here = f"{self._number} {place}"
        missing = []
        for rank in range(self.ranks):
            key = f"liveroll/rank {rank}"
            if not self._store.check([key]) or self._store.get(key).decode() != here:
                missing.append(rank)
        if not missing:
            return  # the last one has just come
        what = "did not come to the end of the call" if place == "end" else "did not call generate with the group"
        raise RankError(
            f"{name_ranks(missing)} {what} within {self._patience:g} s (RolloutConfig.rank_timeout)", tuple(missing)
        )

    def _forget(self) -> None:
        """Drop what the store holds of earlier calls, which every rank has left."""
        places = [key for place in ("weights", "start", "end") for key in (place, f"{place}/open")]
        for number in range(self._calls.forgotten + 1, self._number):
            for name in ("failed", "heard", *places, "numbers", "beats"):
                # Not every store can: those in files keep all they were told.
                with suppress(RuntimeError, NotImplementedError):
                    self._store.delete_key(f"liveroll/{number}/{name}")
            self._calls.forgotten = number

    def _key(self, *names: str) -> str:
        return f"liveroll/{self._number}/{'/'.join(names)}"
