"""Which rows a captured step is for, in static tensors that the host writes before each replay."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from liveroll.attention.layout import SharedPrefixes
from liveroll.decode.prefixes import PrefixTable
from liveroll.decode.upload import upload_into
from liveroll.scheduling.clusters import Clusters

NO_ROWS = np.empty(0, np.int64)


class StepInputs:
    """The slots of a step's rows, and which of the rows share what; written by `load` alone.

    Args:
        rows: most rows of a step.
        inert: the slot of rows that a step has and does not need.
        together: most rows of a cluster; 1 where there are none.
        device: where the tensors live.
    """

    def __init__(self, rows: int, inert: int, together: int, device: torch.device) -> None:
        self._inert = inert
        self._slots = torch.full((rows,), inert, dtype=torch.int64, device=device)
        self._loaded = NO_ROWS
        self._prefixes = PrefixTable(rows, together, device) if together > 1 else None

    @property
    def bytes(self) -> int:
        """Bytes of the tensors."""
        return self._slots.nbytes + (0 if self._prefixes is None else self._prefixes.bytes)

    def load(self, slots: np.ndarray, clusters: Clusters | None, rung: int) -> None:
        """Make ready for a step of `rung` rows: these slots, and the inert one behind them."""
        rows = np.full(rung, self._inert, np.int64)
        rows[: len(slots)] = slots
        if not np.array_equal(rows, self._loaded):
            self._loaded = NO_ROWS  # those on the device are unknown, should this be interrupted
            upload_into(rows, self._slots[:rung])
            self._loaded = rows
        if clusters is not None:
            assert self._prefixes is not None
            self._prefixes.load(clusters, rung)

    def slots(self, rung: int) -> Tensor:
        """`[rung]` int64 slots of a step."""
        return self._slots[:rung]

    def prefixes(self, rung: int) -> SharedPrefixes:
        """Which rows of a step begin with the same pages, where there are clusters."""
        assert self._prefixes is not None
        return self._prefixes.view(rung)
