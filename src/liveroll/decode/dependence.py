"""What captured steps depend on, compared once a call with what it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from liveroll.config import RolloutConfig
from liveroll.model.adapters import adapter_state
from liveroll.model.forward import autocast_dtype
from liveroll.model.fusion import Fusion
from liveroll.model.geometry import ModelShape
from liveroll.model.hooks import needed_hooks
from liveroll.model.signature import Signature, names_of, tensors_of


class Comparison(NamedTuple):
    """What a call found.

    Attributes:
        signature: what steps depend on now.
        difference: how that differs from what was kept; None where it does not.
        needed_hooks: why the model needs hooks in every forward; None where it does not.
    """

    signature: Signature
    difference: str | None
    needed_hooks: str | None


class Dependence:
    """Keeps what the captured steps depend on.

    Args:
        model: the model.
        config: the engine's.
        fusion: the model's projections that are one product meanwhile.
    """

    def __init__(self, model: PreTrainedModel, config: RolloutConfig, fusion: Fusion) -> None:
        self._model = model
        self._config = config
        self._fusion = fusion
        self._kept: Signature | None = None
        self._names: list[str] = []

    def compare(
        self, shape: ModelShape, dtype: torch.dtype, modules: Sequence[nn.Module], room: dict[str, int]
    ) -> Comparison:
        """Fuse projections, where they may be, and compare what steps depend on with what is kept.

        Args:
            shape: the model's layers.
            dtype: dtype of keys and values.
            modules: all modules of the model.
            room: what rows have room for, by name.

        Raises:
            FusionError: `fuse` is True and projections cannot be fused.
        """
        settings = {"training mode": _mode(modules), "KV dtype": dtype, "layers": shape.layers, **room}
        settings["autocast"] = autocast_dtype(self._model.device)
        settings["precision of float32 products"] = torch.backends.cuda.matmul.fp32_precision
        settings["adapters"] = adapter_state(modules)
        tensors = tensors_of(modules)
        needed = None if self._config.capture is False else needed_hooks(self._model, modules, tensors)
        settings["need of hooks"] = needed
        settings["fused projections"] = self._fusion.state
        signature = Signature.of(tensors, settings)
        difference = self._difference(signature)
        refused = needed is not None and True in (self._config.capture, self._config.prefill_capture)
        if not refused and self._fusion.renew(moved=difference is not None):
            settings["fused projections"] = self._fusion.state
            signature = Signature.of(tensors, settings)
            difference = difference or self._difference(signature)
        return Comparison(signature, difference, needed)

    def keep(self, signature: Signature) -> None:
        """Compare the next call with this."""
        if self._kept is None or not self._kept.has_places_of(signature):
            self._names = names_of(self._model)
        self._kept = signature

    def forget(self) -> None:
        """Let the next call be as the first."""
        self._kept = None

    def _difference(self, signature: Signature) -> str | None:
        if self._kept is None:
            return "the first call"
        return self._kept.difference(signature, self._names, lambda: names_of(self._model))


def _mode(modules: Sequence[nn.Module]) -> str:
    flags = [module.training for module in modules]
    return "train" if all(flags) else f"mixed ({hash(tuple(flags))})" if any(flags) else "eval"
