"""The tokens of the running rows, collected without touching one row at a time."""

from __future__ import annotations

import numpy as np

from liveroll.scheduling.details import Details, Wanted


class Transcript:
    """Response tokens of each slot since it was last started.

    Args:
        slots: rows of the running batch.
        budget: most tokens that any response may come to hold.
        wanted: what is kept of each token besides its log-probability.
    """

    def __init__(self, slots: int, budget: int, wanted: Wanted) -> None:
        self._tokens = np.zeros((slots, budget), np.int64)
        self._logprobs = np.zeros((slots, budget), np.float32)
        self._wanted = wanted
        self._numbers = np.zeros((slots, budget, wanted.numbers), np.int32)
        self._kept: list[list[np.ndarray]] = [[] for _ in range(slots)]
        self.counts = np.zeros(slots, np.int64)

    def start(self, slot: int, tokens: np.ndarray, logprobs: np.ndarray, details: Details | None) -> None:
        """Begin a slot with the tokens that its request already has."""
        self.counts[slot] = len(tokens)
        self._kept[slot] = []
        if len(tokens):
            self._tokens[slot, : len(tokens)] = tokens
            self._logprobs[slot, : len(logprobs)] = logprobs
            self._numbers[slot, : len(tokens)] = 0 if details is None else details.numbers
            self._kept[slot] = [np.empty(0, np.int32)] * len(tokens) if details is None else list(details.kept)

    def append(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, details: Details | None) -> None:
        """Add one token to each of `slots`."""
        columns = self.counts[slots]
        self._tokens[slots, columns] = tokens
        self._logprobs[slots, columns] = logprobs
        if details is not None:
            self._numbers[slots, columns] = details.numbers
            for slot, ids in zip(slots.tolist(), details.kept, strict=bool(details.kept)):
                self._kept[slot].append(ids)
        self.counts[slots] = columns + 1

    def tokens(self, slot: int) -> np.ndarray:
        """The tokens of a slot, as a view that the next `append` or `start` may change."""
        row: np.ndarray = self._tokens[slot, : self.counts[slot]]
        return row

    def read(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the tokens and log-probabilities of a slot."""
        count = self.counts[slot]
        return self._tokens[slot, :count].copy(), self._logprobs[slot, :count].copy()

    def read_details(self, slot: int) -> Details | None:
        """Copies of the details of a slot's tokens; None where nothing is wanted."""
        if not self._wanted.rows:
            return None
        numbers = self._numbers[slot, : self.counts[slot]].copy()
        return Details(self._wanted, numbers, list(self._kept[slot]))
