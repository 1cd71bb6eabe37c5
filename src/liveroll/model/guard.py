"""The model as a rollout needs it, and afterwards exactly as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from liveroll.attention import interface
from liveroll.model.versions import attention_implementation


class ModelGuard:
    """Puts a model into rollout mode and back.

    It remembers every module's training flag and gradient-checkpointing flag, the attention implementation and
    the random state of the process. Parameters, buffers, hooks and `requires_grad` are never touched.

    Args:
        model: the model.
        training: the mode to generate in; None leaves every module in its own.
    """

    def __init__(self, model: PreTrainedModel, *, training: bool | None) -> None:
        self._model = model
        self._training = training
        self.own = attention_implementation(model)
        """Name of the attention implementation that the model came with."""
        interface.register()

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Inside, the model is in the mode asked for, without gradients, checkpointing or our attention yet."""
        modules = list(self._model.modules())
        wanted = self._training
        flipped = [module for module in modules if wanted is not None and module.training != wanted]
        checkpointing = [module for module in modules if getattr(module, "gradient_checkpointing", False)]
        device = self._model.device
        try:
            for module in flipped:
                module.training = wanted
            for module in checkpointing:
                module.gradient_checkpointing = False
            with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
                yield
        finally:
            for module in flipped:
                module.training = not wanted
            for module in checkpointing:
                module.gradient_checkpointing = True

    @contextmanager
    def our_attention(self) -> Iterator[None]:
        """Inside, the model's layers call `liveroll.attention.interface.attention`."""
        with self._attention(interface.NAME):
            yield

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        """Inside `our_attention`, the implementation that the model came with."""
        with self._attention(self.own):
            yield

    @contextmanager
    def _attention(self, name: str) -> Iterator[None]:
        before = attention_implementation(self._model)
        self._model.set_attn_implementation(name)
        try:
            yield
        finally:
            self._model.set_attn_implementation(before)
