"""Python objects given to other ranks of a group. Whoever receives them trusts those who sent them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from liveroll.model.device import made_current


def gather_objects(value: Any, group: ProcessGroup, device: torch.device) -> list[Any]:
    """What each rank of the group gave, in their order.

    Args:
        value: this rank's.
        group: the group.
        device: this rank's, for groups that only exchange what is on a GPU.
    """
    values: list[Any] = [None] * group.size()
    with made_current(device):
        dist.all_gather_object(values, value, group=group)
    return values


def swap_objects(values: Sequence[Any], group: ProcessGroup, device: torch.device) -> list[Any]:
    """What each rank of the group gave to this one, in their order.

    Args:
        values: for each rank, what it is given.
        group: the group.
        device: as for `gather_objects`.
    """
    where = torch.device("cpu") if "cpu:" in str(dist.get_backend_config(group)) else device
    blobs = [pickle.dumps(value) for value in values]
    sizes = [len(blob) for blob in blobs]
    with made_current(device):
        coming = torch.empty(len(sizes), dtype=torch.int64, device=where)
        dist.all_to_all_single(coming, torch.tensor(sizes, device=where), group=group)
        ends = coming.tolist()
        received = torch.empty(sum(ends), dtype=torch.uint8, device=where)
        sent = _bytes(b"".join(blobs)).to(where)
        dist.all_to_all_single(received, sent, ends, sizes, group=group)
    parts = received.cpu().numpy()
    return [pickle.loads(part.tobytes()) for part in np.split(parts, np.cumsum(ends)[:-1])]


def _bytes(blob: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(blob, np.uint8).copy())
