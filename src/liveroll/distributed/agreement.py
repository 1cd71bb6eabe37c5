"""Decisions that all ranks of a group take together."""

from __future__ import annotations

import torch
from torch import distributed as dist


def any_rank(flag: bool, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether the flag is set on any rank of a group: one all-reduce MAX. Without a group, the flag itself.

    Args:
        flag: this rank's.
        group: the ranks that decide together, or None.
        device: where the group's backend reduces.
    """
    return bool(_reduce(int(flag), dist.ReduceOp.MAX, group, device))


def least_of(number: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    """The least of the ranks' numbers: one all-reduce MIN. Without a group, the number itself.

    Args:
        number: this rank's.
        group: the ranks that decide together, or None.
        device: where the group's backend reduces.
    """
    return _reduce(number, dist.ReduceOp.MIN, group, device)


def _reduce(
    number: int, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None, device: torch.device
) -> int:
    if group is None:
        return number
    votes = torch.tensor([number], device=device)
    dist.all_reduce(votes, op=operation, group=group)
    return int(votes.item())
