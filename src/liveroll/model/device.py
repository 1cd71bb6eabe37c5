"""Which GPU is current: where kernels are launched and events are recorded, whatever they are about."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def made_current(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, `device` is the process's current GPU, if it is one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
