"""Pages of all layers copied in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _copy(words, starts, sizes, sources, targets, BLOCK: tl.constexpr):
    copy, tensor, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, size = tl.load(starts + tensor), tl.load(sizes + tensor)
    source = words + start + tl.load(sources + copy) * size
    target = words + start + tl.load(targets + copy) * size
    index = block * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    tl.store(target + index, tl.load(source + index, mask=inside), mask=inside)


def copy_pages(words: Tensor, starts: Tensor, sizes: Tensor, largest: int, sources: Tensor, targets: Tensor) -> None:
    """Copy pages within each of T tensors that lie in one piece of memory.

    Args:
        words: `[W]` integers, the memory.
        starts: `[T]` int64, the word where each tensor begins.
        sizes: `[T]` int64, words in a page of each.
        largest: the largest of them.
        sources: `[C]` int64 pages.
        targets: `[C]` int64 pages, all different and none of them a source.
    """
    block = min(triton.next_power_of_2(largest), 1024)
    grid = (len(sources), len(starts), triton.cdiv(largest, block))
    _copy[grid](words, starts, sizes, sources, targets, BLOCK=block, enable_fp_fusion=True)
