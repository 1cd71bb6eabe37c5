"""Decisions that all ranks of a group take together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import distributed as dist

from liveroll.errors import RankError

_MOST_NAMED = 8


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


def bounds(least: int, most: int, group: dist.ProcessGroup, device: torch.device) -> tuple[int, int]:
    """The least and the most of the ranks' numbers: one all-reduce MAX.

    Args:
        least: the least number that this rank knows of.
        most: the most.
        group: the ranks.
        device: where the group's backend reduces.
    """
    votes = torch.tensor([-least, most], device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
    least, most = votes.tolist()
    return -least, most


@contextmanager
def failing_together(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """What fails inside on one rank of a group fails on all of them: one all-reduce MAX at its end.

    Args:
        group: ranks that compute layers together, or None.
        device: where the group's backend reduces.

    Raises:
        RankError: it failed on another rank, and not on this one.
    """
    failed = True
    try:
        yield
        failed = False
    finally:
        # One of the ranks that failed, counted from 1.
        number = 0 if group is None else _reduce((group.rank() + 1) * failed, dist.ReduceOp.MAX, group, device)
        if number and not failed:
            raise RankError(
                f"rank {number - 1} of the tensor-parallel group failed, and so does the call; what it raised says why",
                (number - 1,),
            )


def check_agreement(subjects: Sequence[Mapping[str, str]], group: str = "the group") -> None:
    """Hold the ranks to one value of every subject. Each of them knows all values, so all raise the same error.

    Args:
        subjects: of each rank, the value of each subject that it has a say in.
        group: what the ranks are, in words.

    Raises:
        RankError: ranks disagree, naming the subject, the values and the ranks.
    """
    for subject in dict.fromkeys(name for own in subjects for name in own):
        values: dict[str, list[int]] = {}
        for rank, own in enumerate(subjects):
            if subject in own:
                values.setdefault(own[subject], []).append(rank)
        if len(values) > 1:
            described = ", ".join(
                f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}" for value, ranks in values.items()
            )
            others = [rank for ranks in list(values.values())[1:] for rank in ranks]
            raise RankError(f"the ranks of {group} disagree about {subject}: {described}", tuple(sorted(others)))


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks by their numbers, the first few of them if they are many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = [str(rank) for rank in ranks[:_MOST_NAMED]]
    rest = len(ranks) - len(named)
    last = f"{rest} others" if rest else named.pop()
    return f"ranks {', '.join(named)} and {last}"


def _reduce(
    number: int, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None, device: torch.device
) -> int:
    if group is None:
        return number
    votes = torch.tensor([number], device=device)
    dist.all_reduce(votes, op=operation, group=group)
    return int(votes.item())
