"""Ranks that compute layers together, held to one call: what one of them was given, all must have been given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import TypeVar

import torch
from torch.distributed import ProcessGroup

from liveroll.distributed.agreement import bounds, check_agreement
from liveroll.distributed.exchange import gather_objects
from liveroll.errors import RankError

Read = TypeVar("Read")


def read_together(
    read: Callable[[], Read],
    subjects: Callable[[Read], Mapping[str, str]],
    group: ProcessGroup | None,
    device: torch.device,
) -> Read:
    """What a rank reads of its call, once it is known that all ranks of a group read the same.

    One all-reduce tells; only where it is not so are the subjects themselves exchanged. Without a group it is `read`.

    Args:
        read: reads the call, and raises where it is refused.
        subjects: of what was read, the values that must be the same on all ranks, by name.
        group: the ranks that compute the model's layers together, or None.
        device: where the group's backend reduces.

    Raises:
        RankError: the ranks disagree, or another one's call is refused.
        Exception: whatever `read` raises on this rank.
    """
    if group is None:
        return read()
    failure: Exception | None = None
    told = ""
    own: dict[str, str] = {}
    try:
        value = read()
        own = dict(subjects(value))
    except Exception as error:
        failure, told = error, f"{type(error).__name__}: {error}"
    if not _are_equal(f"{told} {own}", group, device):
        everything = gather_objects((told, own), group, device)
        refused = [rank for rank, (complaint, _) in enumerate(everything) if complaint]
        if failure is None and refused:
            first = refused[0]
            raise RankError(
                f"rank {first} of the tensor-parallel group failed, and so does the call: {everything[first][0]}",
                tuple(refused),
            )
        if failure is None:
            check_agreement([entry for _, entry in everything], "the tensor-parallel group")
    if failure is not None:
        raise failure
    return value


def _are_equal(text: str, group: ProcessGroup, device: torch.device) -> bool:
    digest = int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")
    least, most = bounds(digest, digest, group, device)
    return least == most
