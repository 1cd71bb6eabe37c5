"""Ranks that run the rows of a call, simulated from one end of a row to the next."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from liveroll.scheduling.admission import REFILL_SHARE, refill_of
from liveroll.scheduling.shares import Deal


@dataclass(frozen=True)
class Job:
    """What is simulated.

    Attributes:
        ranks: ranks.
        slots: rows that each runs side by side.
        prompts: prompts of each rank.
        samples: of each prompt.
        median: tokens of a response.
        prompt_spread: standard deviation of the logarithm of lengths, between prompts.
        rank_spread: the same between ranks, as where each has a task of its own.
        sample_spread: the same between samples of a prompt.
        most: tokens at which every response ends.
        prefill_ms: of an admission.
        prompt_ms: of each prompt in it.
        queue_ms: until a rank has the chunk that it asked for, in which it does nothing else.
        store_ms: in which the store serves one rank and no other.
    """

    ranks: int = 64
    slots: int = 32
    prompts: int = 16
    samples: int = 8
    median: float = 400.0
    prompt_spread: float = 0.6
    rank_spread: float = 0.0
    sample_spread: float = 0.6
    most: int = 4096
    prefill_ms: float = 10.0
    prompt_ms: float = 4.0
    queue_ms: float = 1.0
    store_ms: float = 0.05


@dataclass(frozen=True)
class Row:
    """A row, of which the ranks know the prompt alone."""

    group: int
    owner: int
    length: int


def draw(job: Job, seed: int) -> list[Row]:
    """The rows of a call, in the order of admission: all have the same budget, so as the ranks gave them."""
    rng = np.random.default_rng(seed)
    prompts = job.ranks * job.prompts
    logs = math.log(job.median) + job.prompt_spread * rng.standard_normal((prompts, 1))
    logs = logs + job.rank_spread * rng.standard_normal((job.ranks, 1)).repeat(job.prompts, axis=0)
    logs = logs + job.sample_spread * rng.standard_normal((prompts, job.samples))
    lengths = np.clip(np.exp(logs).astype(int), 1, job.most)
    return [Row(prompt, prompt // job.prompts, int(length)) for prompt in range(prompts) for length in lengths[prompt]]


def static(rows: Sequence[Row], ranks: int) -> Deal:
    hands: list[list[Row]] = [[] for _ in range(ranks)]
    for row in rows:
        hands[row.owner].append(row)
    return Deal(tuple(map(tuple, hands)))  # type: ignore[arg-type]


class Rank:
    """A rank between two events: rows running, each by the step at which it ends, and rows waiting."""

    def __init__(self, job: Job, hand: Sequence[Row], line: tuple[float, float]) -> None:
        self._job = job
        self._line = line
        self._waiting = deque(hand)
        self._ends: list[int] = []
        self._step = 0
        self.has_queue = True

    @property
    def wants_more(self) -> bool:
        if not self.has_queue or self._waiting:
            return False
        return not self._ends or self._job.slots - len(self._ends) >= refill_of(self._job.slots)

    def take(self, rows: Sequence[Row]) -> None:
        self.has_queue = bool(rows)
        self._waiting.extend(rows)

    def advance(self) -> float | None:
        """Milliseconds until the next row ends, what is admitted before it included; None if there is none."""
        free = self._job.slots - len(self._ends)
        milliseconds = 0.0
        if self._waiting and (not self._ends or free >= min(len(self._waiting), REFILL_SHARE * self._job.slots)):
            admitted = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
            for row in admitted:
                heapq.heappush(self._ends, self._step + row.length)
            milliseconds += self._job.prefill_ms + self._job.prompt_ms * len({row.group for row in admitted})
        if not self._ends:
            return None
        fixed, each = self._line
        steps = self._ends[0] - self._step
        milliseconds += steps * (fixed + each * len(self._ends))
        self._step = self._ends[0]
        while self._ends and self._ends[0] == self._step:
            heapq.heappop(self._ends)
        return milliseconds


def simulate(job: Job, shares: Deal, line: tuple[float, float]) -> dict[str, Any]:
    """How long the call takes, and which share of its time ranks wait for the last one."""
    ranks = [Rank(job, hand, line) for hand in shares.hands]  # type: ignore[arg-type]
    chunks = deque(shares.chunks)
    ends = [0.0] * job.ranks
    store_free = 0.0
    taken = 0
    events = [(0.0, number) for number in range(job.ranks)]
    while events:
        now, number = heapq.heappop(events)
        rank = ranks[number]
        if shares.chunks and rank.wants_more:
            served = max(now, store_free)
            store_free = served + job.store_ms
            taken += 1
            rank.take(chunks.popleft() if chunks else ())  # type: ignore[arg-type]
            now = served + job.queue_ms
        busy = rank.advance()
        if busy is None:
            ends[number] = now
        else:
            heapq.heappush(events, (now + busy, number))
    last = max(ends)
    return {
        "ms": round(last, 1),
        "idle": round(float(np.mean([last - end for end in ends])) / last, 4),
        "first rank done ms": round(min(ends), 1),
        "chunks taken": taken,
    }


def floor(job: Job, rows: Sequence[Row], line: tuple[float, float]) -> float:
    """Milliseconds that no division goes below: of the longest row alone, or of full slots on all ranks."""
    fixed, each = line
    lengths = [row.length for row in rows]
    full = (fixed + each * job.slots) / job.slots
    return max(max(lengths) * (fixed + each), sum(lengths) * full / job.ranks)
