"""The clusters of a step's rows on the device: one static tensor of whole numbers for all of them."""

from __future__ import annotations

import numpy as np
import torch

from liveroll.attention.layout import SharedPrefixes
from liveroll.decode.upload import upload_into
from liveroll.scheduling.clusters import Clusters


class PrefixTable:
    """Holds which rows of a step share what, written by `load` alone.

    Args:
        rows: most rows of a step.
        together: most rows of a cluster.
        device: where it lives.
    """

    def __init__(self, rows: int, together: int, device: torch.device) -> None:
        self._together = together
        self._flat = torch.zeros(self._size(rows), dtype=torch.int32, device=device)
        self._loaded: tuple[Clusters, int] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return self._flat.nbytes

    def load(self, clusters: Clusters, rows: int) -> None:
        """Have what `view` of so many rows shows be these clusters."""
        if self._loaded is not None and self._loaded[0] is clusters and self._loaded[1] == rows:
            return
        self._loaded = None  # what is on the device is unknown, should this be interrupted
        most, found = rows // 2, len(clusters.tokens)
        members, tokens = np.full((most, self._together), -1, np.int32), np.zeros(most, np.int32)
        shared = np.zeros(rows + 1, np.int32)
        members[:found], tokens[:found] = clusters.members, clusters.tokens
        # The places behind the last member of a cluster, -1, are the entry that is left out.
        shared[clusters.members] = clusters.tokens[:, None]
        flat = np.concatenate([np.array([found], np.int32), shared[:rows], tokens, members.reshape(-1)])
        upload_into(flat, self._flat[: self._size(rows)])
        self._loaded = (clusters, rows)

    def view(self, rows: int) -> SharedPrefixes:
        """The part of the tensor for a step of so many rows, of which every pair may be a cluster."""
        most = rows // 2
        count, shared, tokens, members = self._flat[: self._size(rows)].split([1, rows, most, most * self._together])
        return SharedPrefixes(count, members.view(most, self._together), tokens, shared)

    def _size(self, rows: int) -> int:
        return 1 + rows + rows // 2 * (1 + self._together)
