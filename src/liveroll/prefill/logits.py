"""The logits behind prompts some of whose samples have not begun yet."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor


class PromptLogits:
    """Logits of groups of requests with one prompt, on the device. The scheduler says which are needed again."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}

    def keep(self, group: int, logits: Tensor) -> None:
        """Keep a copy of logits `[V]`: a view would hold all that its forward gave."""
        self._rows[group] = logits.clone()

    def of(self, groups: Sequence[int]) -> Tensor:
        """What is kept of these groups, `[G, V]`."""
        return torch.stack([self._rows[group] for group in groups])

    def drop_others(self, groups: Collection[int]) -> None:
        """Forget all but some groups."""
        self._rows = {group: row for group, row in self._rows.items() if group in groups}
