"""What torch does where the host waits for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch


@contextmanager
def watching_waits(mode: Literal["warn", "error"]) -> Iterator[None]:
    """Inside, every operation that waits for the GPU warns or raises."""
    with warnings.catch_warnings():
        # torch warns once that it does not see all of them.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
