"""The tokens of the running rows, collected without touching one row at a time."""

from __future__ import annotations

import numpy as np


class Transcript:
    """Response tokens of each slot since it was last started.

    Args:
        slots: rows of the running batch.
        budget: most tokens that any request may generate.
    """

    def __init__(self, slots: int, budget: int) -> None:
        self._tokens = np.zeros((slots, budget), np.int64)
        self._logprobs = np.zeros((slots, budget), np.float32)
        self.counts = np.zeros(slots, np.int64)

    def start(self, slot: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Begin a slot with the tokens that its request already has."""
        self._tokens[slot, : len(tokens)] = tokens
        self._logprobs[slot, : len(logprobs)] = logprobs
        self.counts[slot] = len(tokens)

    def append(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Add one token to each of `slots`."""
        columns = self.counts[slots]
        self._tokens[slots, columns] = tokens
        self._logprobs[slots, columns] = logprobs
        self.counts[slots] = columns + 1

    def read(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the tokens and log-probabilities of a slot."""
        count = self.counts[slot]
        return self._tokens[slot, :count].copy(), self._logprobs[slot, :count].copy()
