"""What is reported of sampled tokens besides their log-probabilities, where somebody asked for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from liveroll.types import ResolvedSampling


@dataclass(frozen=True)
class Wanted:
    """What a call is told of each token. Whatever the prompts ask for, all rows of a call report the same.

    Attributes:
        raw: the log-probability in the model's own distribution.
        top: most likely alternatives; a power of two, so that few step shapes come to be captured.
        kept: ids reported of those that truncation keeps, at most; a power of two.
    """

    raw: bool = False
    top: int = 0
    kept: int = 0

    @classmethod
    def of(cls, samplings: Iterable[ResolvedSampling]) -> Wanted:
        """What serves all of these settings."""
        samplings = list(samplings)
        return cls(
            raw=any(s.raw_logprobs for s in samplings),
            top=_power_of_two(max((s.top_logprobs for s in samplings), default=0)),
            kept=_power_of_two(max((s.kept_tokens for s in samplings if s.truncates), default=0)),
        )

    @property
    def numbers(self) -> int:
        """Numbers of a token that are always there: all but the kept ids."""
        return self.raw + 2 * self.top + (self.kept > 0)

    @cached_property
    def rows(self) -> int:
        """Rows of a step's report that hold them: the numbers, then the kept ids."""
        return self.numbers + self.kept

    def read(self, report: np.ndarray) -> Details | None:
        """Details of B tokens from the last rows of a report, int32 `[rows, B]`; None where nothing is wanted."""
        if not self.rows:
            return None
        numbers = np.ascontiguousarray(report[: self.numbers].T)
        kept: list[np.ndarray] = []
        if self.kept:
            # A list that is longer than what was asked for is of no use: it is cut off.
            counts = np.where(numbers[:, -1] <= self.kept, numbers[:, -1], 0)
            kept = [ids[:count].copy() for ids, count in zip(report[self.numbers :].T, counts, strict=True)]
        return Details(self, numbers, kept)


NOTHING = Wanted()
"""Tokens and their log-probabilities alone."""


@dataclass(frozen=True)
class Details:
    """Details of T tokens.

    Attributes:
        wanted: what they hold.
        numbers: int32 `[T, wanted.numbers]`, log-probabilities as the bits of float32: that in the model's own
            distribution, the ids of the alternatives, theirs, and how many tokens truncation kept.
        kept: the kept ids of each token, int32; empty where they are more than reported.
    """

    wanted: Wanted
    numbers: np.ndarray
    kept: Sequence[np.ndarray]

    @property
    def raw_logprobs(self) -> np.ndarray:
        """Float32 `[T]`, where wanted."""
        return self.numbers[:, 0].copy().view(np.float32)

    @property
    def top_ids(self) -> np.ndarray:
        """Int32 `[T, wanted.top]`, the most likely first."""
        start = int(self.wanted.raw)
        return self.numbers[:, start : start + self.wanted.top]

    @property
    def top_logprobs(self) -> np.ndarray:
        """Float32 `[T, wanted.top]`; -inf where there is no such alternative."""
        start = self.wanted.raw + self.wanted.top
        return self.numbers[:, start : start + self.wanted.top].copy().view(np.float32)

    @property
    def kept_counts(self) -> np.ndarray:
        """Int32 `[T]`, tokens that truncation kept, where wanted."""
        return self.numbers[:, -1]

    def take(self, chosen: np.ndarray) -> Details:
        """Those of some tokens, bool `[T]`."""
        kept = [ids for ids, is_chosen in zip(self.kept, chosen, strict=True) if is_chosen] if self.kept else []
        return Details(self.wanted, self.numbers[chosen], kept)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0
