"""Kernels that start while the one before them ends: programmatic dependent launch, of NVIDIA's GPUs since Hopper.

The first of the two says when the other may start, and the other waits for the first before it reads what that writes.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a device can do that."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
