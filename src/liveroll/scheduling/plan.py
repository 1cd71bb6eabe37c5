"""What a step does, as decided by the scheduler and carried out on the device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from liveroll.scheduling.clusters import Clusters
from liveroll.scheduling.details import Details
from liveroll.scheduling.request import Request


class Outcome(IntEnum):
    """How a row came out of a step."""

    RUNNING = 0
    STOPPED = 1
    SPENT = 2
    IDLE = 3


@dataclass(frozen=True)
class PrefillStep:
    """Run what has to be run of newly admitted requests, and sample the next token of each.

    The samples of a prompt share one forward, whose logits are its source. A source is the position in `admitted` of
    the request that is run, or `~group` for the logits kept of a group in an earlier step.

    Attributes:
        admitted: the requests.
        slots: int64 slots that they were given.
        tenancies: int64, as in `DecodeStep`.
        sources: where each of them has its logits from.
        kept: the sources whose logits are needed again behind this step; no other logits are.
        copies: pairs of pages, from and to, that are copied once all is run.
    """

    admitted: tuple[Request, ...]
    slots: np.ndarray
    tenancies: np.ndarray
    sources: tuple[int, ...]
    kept: frozenset[int]
    copies: tuple[tuple[int, int], ...]

    def takers(self) -> dict[int, list[int]]:
        """Of each source, the positions in `admitted` of the requests that sample from its logits."""
        takers: dict[int, list[int]] = {}
        for index, source in enumerate(self.sources):
            takers.setdefault(source, []).append(index)
        return takers

    def group_of(self, source: int) -> int:
        """The group whose prompt the logits of a source are behind."""
        return ~source if source < 0 else self.admitted[source].group


@dataclass(frozen=True)
class DecodeStep:
    """Feed the last token of every running row and sample its next one.

    Attributes:
        slots: int64 slots of the rows, ascending.
        tenancies: int64, which tenant of each slot the step is for; by the time its result is known, the row may
            have ended and the slot may have been given away.
        longest: keys that the longest of the rows attends to.
        clusters: rows whose shared keys attention reads once; None where it reads them for each row.
    """

    slots: np.ndarray
    tenancies: np.ndarray
    longest: int
    clusters: Clusters | None = None


@dataclass(frozen=True)
class Wait:
    """Nothing can be decided before the results of steps in flight are known."""


StepPlan = PrefillStep | DecodeStep


@dataclass(frozen=True)
class StepResult:
    """What the device reports of a step, one entry for each of its rows.

    Attributes:
        tokens: int64 sampled tokens.
        outcomes: `Outcome` codes; the token of an IDLE row means nothing.
        logprobs: float32 log-probabilities of the tokens.
        details: what else was asked for of them.
    """

    tokens: np.ndarray
    outcomes: np.ndarray
    logprobs: np.ndarray
    details: Details | None = None
