"""Where the tokens of a forward stand: several sequences packed into one row, or one token of each of many rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

# Least share of a group's longest that its others have. At most half of what a group computes is padding's: of
# sequences the scores, which grow with the square of a length, and of rows the keys.
_ALIKE_SEQUENCES, _ALIKE_ROWS = 0.7, 0.5


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
        lengths: tokens of each of N sequences; None in a captured forward, which serves any lengths.
        column: `[T]` int64, the position of each token in its sequence.
    """

    lengths: tuple[int, ...] | None
    column: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedLayout:
        """The layout of sequences of these lengths."""
        return cls(tuple(lengths), torch.from_numpy(columns_of(lengths)).to(device))

    @property
    def known(self) -> tuple[int, ...]:
        """The lengths, where the host knows them."""
        assert self.lengths is not None
        return self.lengths

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.known)

    @cached_property
    def starts(self) -> Tensor:
        """`[N + 1]` int32, where each sequence begins, and T."""
        return torch.from_numpy(np.cumsum([0, *self.known], dtype=np.int32)).to(self.column.device)

    @property
    def last(self) -> Tensor:
        """`[N]` int64, the index of each sequence's last token."""
        return self.starts[1:].long() - 1

    @cached_property
    def groups(self) -> tuple[LikeLengths, ...]:
        """The sequences in groups of like lengths, for a backend that pads; made once for all layers of a forward."""
        lengths = np.array(self.known)
        starts = np.cumsum(lengths) - lengths
        groups: list[LikeLengths] = []
        for members in _alike(lengths, _ALIKE_SEQUENCES):
            row = np.repeat(np.arange(len(members)), lengths[members])
            begin = np.cumsum(lengths[members]) - lengths[members]
            column = np.arange(len(row)) - begin[row]
            token = starts[members][row] + column
            moved = torch.from_numpy(np.stack([token, row, column])).to(self.column.device)
            groups.append(LikeLengths(len(members), int(lengths[members].max()), *moved))
        return tuple(groups)


def columns_of(lengths: Sequence[int]) -> np.ndarray:
    """`[T]` int64, the position of each token of packed sequences in its own."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)


@dataclass(frozen=True)
class LikeRows:
    """Rows of a decode step that are alike in the number of their keys.

    Attributes:
        rows: `[G]` int64, which rows of the step; None for all of them, in order.
        pages: `[G * p]` int32, the first pages of each row, enough for the longest of the group.
        lengths: `[G]` int64 keys of each row.
        masks: a backend's masks by window, made once for all layers of a forward.
    """

    rows: Tensor | None
    pages: Tensor
    lengths: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class SharedPrefixes:
    """Which rows of a decode step begin with the same pages, in clusters of M rows at most.

    Attributes:
        count: `[1]` int32, how many clusters there are: the first ones of C.
        members: `[C, M]` int32 rows; -1 behind a cluster's last.
        tokens: `[C]` int32 keys in the pages that all rows of a cluster begin with.
        shared: `[B]` int32, the same for each row; 0 for a row of no cluster.
    """

    count: Tensor
    members: Tensor
    tokens: Tensor
    shared: Tensor


@dataclass(frozen=True)
class PagedLayout:
    """One new token for each of B rows whose earlier tokens are in pages.

    Attributes:
        block_table: `[B, P]` int32 pages of each row.
        lengths: `[B]` int64 keys of each row, the new token included.
        index: `[B]` int64 storage rows that the new tokens go to.
        longest: no row has more keys than this.
        prefixes: rows that begin with the same pages, for a backend that reads these once for several rows.
    """

    block_table: Tensor
    lengths: Tensor
    index: Tensor
    longest: int
    prefixes: SharedPrefixes | None = None
    _groups: dict[int, tuple[LikeRows, ...]] = field(default_factory=dict, init=False)

    def groups(self, page_size: int) -> tuple[LikeRows, ...]:
        """The rows in groups of like lengths, for a backend that pads; made once for all layers of a forward.

        A device is not asked for lengths, so that there all rows are one group.
        """
        if page_size not in self._groups:
            self._groups[page_size] = tuple(self._group(page_size))
        return self._groups[page_size]

    def _group(self, page_size: int) -> Iterator[LikeRows]:
        if self.lengths.device.type != "cpu":
            pages = -(-self.longest // page_size)
            yield LikeRows(None, self.block_table[:, :pages].flatten(), self.lengths)
            return
        counts = -(-self.lengths.numpy() // page_size)
        for members in _alike(counts, _ALIKE_ROWS):
            pages = int(counts[members].max())
            if len(members) == len(counts):
                yield LikeRows(None, self.block_table[:, :pages].flatten(), self.lengths)
            else:
                rows = torch.from_numpy(members)
                yield LikeRows(rows, self.block_table[rows, :pages].flatten(), self.lengths[rows])


def _alike(lengths: np.ndarray, share: float) -> Iterator[np.ndarray]:
    """Positions of lengths, ascending, in groups of which each has at least that share of the group's greatest."""
    order = np.argsort(-lengths, kind="stable")
    first = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or lengths[order[end]] < share * lengths[order[first]]:
            yield np.sort(order[first:end])
            first = end
