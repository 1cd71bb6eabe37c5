"""The KV storage that an engine keeps from call to call."""

from __future__ import annotations

import torch

from liveroll.config import RolloutConfig
from liveroll.kv.budget import allowed_pages, check_fits, free_bytes
from liveroll.kv.storage import PagedStorage, bytes_per_token
from liveroll.model.geometry import ModelShape


class StoragePool:
    """Owns at most one `PagedStorage`; the old one is dropped before its replacement is allocated.

    Args:
        config: how much memory may be taken.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._storage: PagedStorage | None = None
        self._key: tuple[object, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes held now."""
        return 0 if self._storage is None else self._storage.bytes

    def provide(
        self, shape: ModelShape, dtype: torch.dtype, device: torch.device, *, rows: int, longest: int
    ) -> PagedStorage:
        """Storage for a call.

        Args:
            shape: the model's layers.
            dtype: dtype of keys and values.
            device: where they live.
            rows: rows that run side by side, at most.
            longest: tokens that the longest row of the call comes to hold.

        Raises:
            KVMemoryError: the memory allowed cannot hold the longest row; what was held stays.
        """
        size = self._config.page_size
        fixed = self._config.max_length
        wanted = rows * -(-longest // size)
        if fixed is not None:
            wanted = self._config.max_slots * -(-fixed // size)
        token_bytes = bytes_per_token(shape.layers, dtype)
        key = (shape.layers, dtype, device)
        held = self._storage if key == self._key else None
        if held is not None and held.pages > wanted:
            return held
        free = free_bytes(device) + self.bytes
        allowed = allowed_pages(self._config, token_bytes, free)
        check_fits(self._config, longest, allowed, token_bytes)
        pages = min(wanted, allowed) + 1
        if held is not None and held.pages >= pages:
            return held
        del held
        self.release()
        self._storage = PagedStorage(shape.layers, pages, size, dtype, device)
        self._key = key
        return self._storage

    def release(self) -> None:
        """Let go of the storage."""
        self._storage, self._key = None, ()
