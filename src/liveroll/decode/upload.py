"""Host arrays to the device, without waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of an array on a device; the array may be changed at once."""
    if device.type != "cuda":
        return torch.tensor(array, device=device)
    # Pinned memory is copied in the order of the stream, and the allocator keeps it until the copy has been made.
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)
