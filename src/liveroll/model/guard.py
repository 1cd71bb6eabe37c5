"""The model as a rollout needs it, and afterwards exactly as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from liveroll.attention import interface
from liveroll.errors import UnsupportedModelError
from liveroll.model.versions import attention_implementation


class ModelGuard:
    """Puts a model into rollout mode and back.

    It remembers every module's training flag and gradient-checkpointing flag, the attention implementation and
    the random state of the process. Parameters, buffers, hooks and `requires_grad` are never touched.

    Args:
        model: the model.
        training: the mode to generate in.
    """

    def __init__(self, model: PreTrainedModel, *, training: bool) -> None:
        self._model = model
        self._training = training
        self.own = attention_implementation(model)
        """Name of the model's own attention implementation, as the last rollout found it."""
        interface.register()

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Inside, the model is in the mode asked for, without gradients, checkpointing or our attention yet."""
        modules = list(self._model.modules())
        training = [module.training for module in modules]
        checkpointing = [module for module in modules if getattr(module, "gradient_checkpointing", False)]
        device = self._model.device
        gradients, random = torch.is_grad_enabled(), torch.get_rng_state()
        device_random = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.own = attention_implementation(self._model)

        def restore() -> None:
            torch.set_grad_enabled(gradients)
            torch.set_rng_state(random)
            if device_random is not None:
                torch.cuda.set_rng_state(device_random, device)
            for module, flag in zip(modules, training, strict=True):
                module.training = flag
            for module in checkpointing:
                module.gradient_checkpointing = True

        try:
            for module in modules:
                module.training = self._training
            for module in checkpointing:
                module.gradient_checkpointing = False
            with torch.no_grad():
                yield
        finally:
            # A second Ctrl-C, or the first one late, may arrive while this runs.
            try:
                restore()
            except KeyboardInterrupt:
                restore()
                raise

    @contextmanager
    def our_attention(self) -> Iterator[None]:
        """Inside, the model's layers call `liveroll.attention.interface.attention`.

        Raises:
            UnsupportedModelError: the model's attention cannot be chosen.
        """
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
        try:
            self._model.set_attn_implementation(name)
            if attention_implementation(self._model) != name:
                raise UnsupportedModelError(
                    f"{type(self._model).__name__} cannot be rolled out: it does not attend through transformers' "
                    "attention interface"
                )
            yield
        finally:
            try:
                self._model.set_attn_implementation(before)
            except KeyboardInterrupt:
                self._model.set_attn_implementation(before)
                raise
