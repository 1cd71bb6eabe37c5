"""Where the tokens of a forward stand: several sequences packed into one row, or one token of each of many rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

# Sequences of at least this share of a group's longest join it, so that at most half of a group's scores are padding's.
_ALIKE = 0.7


@dataclass(frozen=True)
class LikeLengths:
    """Sequences of a packed row that are alike in length.

    Attributes:
        rows: how many.
        width: tokens of the longest.
        token: `[T']` int64, their tokens in the packed row, sequence by sequence.
        row: `[T']` int64, the sequence of each of these tokens among those of the group.
        column: `[T']` int64, its position in the sequence.
    """

    rows: int
    width: int
    token: Tensor
    row: Tensor
    column: Tensor


@dataclass(frozen=True)
class PackedLayout:
    """Sequences laid one behind the other, without padding.

    Attributes:
        lengths: tokens of each of N sequences.
        row: `[T]` int64, the sequence of each token.
        column: `[T]` int64, the position of each token in its sequence.
        starts: `[N + 1]` int32, where each sequence begins, and T.
    """

    lengths: tuple[int, ...]
    row: Tensor
    column: Tensor
    starts: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedLayout:
        """The layout of sequences of these lengths."""
        starts = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.repeat(np.arange(len(lengths)), lengths)
        columns = np.arange(starts[-1]) - starts[rows]
        row, column = torch.from_numpy(np.stack([rows, columns])).to(device)
        return cls(tuple(lengths), row, column, torch.from_numpy(starts.astype(np.int32)).to(device))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @property
    def last(self) -> Tensor:
        """`[N]` int64, the index of each sequence's last token."""
        return self.starts[1:].long() - 1

    @cached_property
    def groups(self) -> tuple[LikeLengths, ...]:
        """The sequences in groups of like lengths, for a backend that pads; made once for all layers of a forward."""
        lengths = np.array(self.lengths)
        starts = np.cumsum(lengths) - lengths
        order = np.argsort(-lengths, kind="stable")
        groups: list[LikeLengths] = []
        first = 0
        for end in range(1, len(order) + 1):
            width = int(lengths[order[first]])
            if end < len(order) and lengths[order[end]] >= _ALIKE * width:
                continue
            members = np.sort(order[first:end])
            row = np.repeat(np.arange(len(members)), lengths[members])
            begin = np.cumsum(lengths[members]) - lengths[members]
            column = np.arange(len(row)) - begin[row]
            token = starts[members][row] + column
            moved = torch.from_numpy(np.stack([token, row, column])).to(self.row.device)
            groups.append(LikeLengths(len(members), width, *moved))
            first = end
        return tuple(groups)


@dataclass(frozen=True)
class PagedLayout:
    """One new token for each of B rows whose earlier tokens are in pages.

    Attributes:
        block_table: `[B, P]` int32 pages of each row.
        lengths: `[B]` int64 keys of each row, the new token included.
        index: `[B]` int64 storage rows that the new tokens go to.
        longest: no row has more keys than this.
        masks: a backend's masks by window, made once for all layers of a forward.
    """

    block_table: Tensor
    lengths: Tensor
    index: Tensor
    longest: int
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def pages(self, page_size: int) -> Tensor:
        """`[B * p]` int32, the first pages of each row, enough for the longest."""
        return self.block_table[:, : -(-self.longest // page_size)].flatten()
