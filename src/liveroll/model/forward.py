"""The model's own forward, called the same way over all supported versions of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from liveroll.model.versions import cache_argument, keeps_chosen_logits


class ModelForward:
    """Calls a causal language model with positions and a cache given from outside."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache_argument = cache_argument(model)
        self._keeps = keeps_chosen_logits(model)

    @property
    def device(self) -> torch.device:
        """Where the model's inputs belong."""
        device: torch.device = self._model.device
        return device

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Cache,
        *,
        mask: Tensor | None = None,
        keep: Tensor | int = 0,
    ) -> Tensor:
        """Logits `[B, K, V]` of a forward.

        Args:
            tokens: `[B, T]` int64.
            positions: `[B, T]` int64.
            cache: takes the keys and values.
            mask: `[B, T]`, nonzero at tokens that are not padding; None where there is none.
            keep: `[K]` int64 columns whose logits are wanted, or how many of the last; 0 for all.
        """
        arguments: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        if self._keeps:
            arguments["logits_to_keep"] = keep
        logits: Tensor = self._model(input_ids=tokens, position_ids=positions, attention_mask=mask, **arguments).logits
        if self._keeps:
            return logits
        return logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast makes of products on a device now; None outside of it."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
