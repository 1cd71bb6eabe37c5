"""Whether attention should read the keys of a prompt once for several of its samples."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

WORTHWHILE_BYTES = 32 * 2**20
"""Bytes of keys and values that must be spared in a layer of a decode step.

What is read once is read by a kernel of its own, which is estimated to take 6 us more on an H200. Rows that read the
same keys for themselves find most of them in its cache of 50 MB, at about 5 TB/s.
"""


def choose_cluster_rows(
    cascade: bool | Literal["auto"],
    groups: Collection[tuple[int, int]],
    *,
    slots: int,
    rows_together: int,
    token_bytes: int,
) -> int:
    """Most rows of a decode step for which keys that they share should be read once; 0 to read them for each row.

    Args:
        cascade: as in `RolloutConfig`.
        groups: of each prompt, the tokens in pages that its samples share, and how many samples it has.
        slots: rows of the running batch.
        rows_together: rows for which attention can do it at a time.
        token_bytes: bytes of a token's keys and values in a layer that sees all of them; 0 where no layer does.
    """
    if cascade is False or rows_together < 2 or not token_bytes:
        return 0
    requests = sum(samples for _, samples in groups)
    spared = sum(tokens * (samples - -(-samples // rows_together)) for tokens, samples in groups)
    if cascade == "auto" and spared * min(slots / requests, 1.0) * token_bytes < WORTHWHILE_BYTES:
        return 0
    return rows_together if spared else 0
