"""Host arrays to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_TORCH_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of an array on a device; the array may be changed at once."""
    if device.type != "cuda":
        return torch.tensor(array, device=device)
    # Pinned memory is copied in the order of the stream, and the allocator keeps it until the copy has been made.
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def upload_into(array: np.ndarray, target: Tensor) -> None:
    """Put an array into a tensor of its shape and dtype; the array may be changed at once."""
    given = torch.from_numpy(array)
    target.copy_(given.pin_memory() if target.is_cuda else given, non_blocking=True)


def upload_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copies of several arrays on a device by one transfer; each starts at a multiple of 8 bytes of it."""
    starts = np.cumsum([0, *(-(-array.nbytes // 8) * 8 for array in arrays)])
    buffer = np.zeros(starts[-1], np.uint8)
    for start, array in zip(starts[:-1], arrays, strict=True):
        buffer[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    moved = upload(buffer, device)
    return [
        moved[start : start + array.nbytes].view(_TORCH_DTYPES[array.dtype.name]).view(array.shape)
        for start, array in zip(starts[:-1].tolist(), arrays, strict=True)
    ]
