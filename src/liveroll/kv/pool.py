"""The KV storage that an engine keeps from call to call."""

from __future__ import annotations

import torch

from liveroll.config import RolloutConfig
from liveroll.kv.budget import allowed_pages, free_bytes
from liveroll.kv.storage import PagedStorage, bytes_per_token
from liveroll.model.geometry import ModelShape


class StoragePool:
    """Owns at most one `PagedStorage`; the old one is dropped before its replacement is allocated.

    Args:
        config: how much memory may be taken.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self.storage: PagedStorage | None = None
        """What is held, written by `provide` and `release` alone."""

    @property
    def bytes(self) -> int:
        """Bytes held now."""
        return 0 if self.storage is None else self.storage.bytes

    def allowed(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> int:
        """Pages that the configuration allows now, what is held counted as free."""
        token_bytes = bytes_per_token(shape.layers, dtype)
        return allowed_pages(self._config, token_bytes, free_bytes(device) + self.bytes)

    def provide(self, shape: ModelShape, dtype: torch.dtype, device: torch.device, pages: int) -> PagedStorage:
        """New storage of `pages` pages and the scratch page, in place of what is held."""
        self.release()
        self.storage = PagedStorage(shape.layers, pages + 1, self._config.page_size, dtype, device)
        return self.storage

    def sleep(self) -> bool:
        """Give the device memory back and keep its addresses, so that captured steps stay valid; False if it cannot."""
        return self.storage is not None and self.storage.arena.unmap()

    def wake(self) -> None:
        """Take device memory again under the same addresses, zeroed; nothing where none was given back."""
        if self.storage is not None:
            self.storage.arena.map()

    def release(self) -> None:
        """Let go of the storage."""
        self.storage = None
