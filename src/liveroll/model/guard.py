"""The model as a rollout needs it, and afterwards exactly as it was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from liveroll.attention import interface
from liveroll.errors import EngineStateError
from liveroll.model.device import made_current
from liveroll.model.restore import restore_in_full
from liveroll.model.signature import walk
from liveroll.model.unwrap import uncompiled
from liveroll.model.versions import AttentionSwitch

_Names = list[tuple[PretrainedConfig, str]]
"""Configurations that modules read, and the attention implementation that each names."""

_rolled_out: dict[int, object] = {}
"""The models that are rolled out, by their identity, and what rolls each out."""


@contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    """Keep other rollouts off a model, by another engine's thread or from inside a forward."""
    me = object()
    try:
        # One operation, so that neither threads nor interrupts come between.
        if _rolled_out.setdefault(id(model), me) is not me:
            raise EngineStateError("another rollout of this model is running, in another thread or around this one")
        yield
    finally:
        if _rolled_out.get(id(model)) is me:
            del _rolled_out[id(model)]


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
        self._attention = AttentionSwitch(model)
        self.own = self._attention.name
        """Name of the model's own attention implementation."""
        self._own: _Names = []
        self._ours: _Names = []
        self.modules: list[nn.Module] = []
        """All modules of the model, as they were found by the rollout that runs."""
        interface.register()

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Inside, the model is in the mode asked for, without gradients, checkpointing or our attention yet.

        Modules that the trainer compiled run as they are. The model's GPU is the current one.

        Raises:
            EngineStateError: another rollout of the model is running.
        """
        with _alone(self._model), self._in_mode(), uncompiled(self.modules):
            yield

    @contextmanager
    def _in_mode(self) -> Iterator[None]:
        modules = self.modules = walk(self._model)
        wanted = self._training
        flipped = [] if wanted is None else [module for module in modules if module.training != wanted]
        checkpointing = [module for module in modules if module.__dict__.get("gradient_checkpointing")]
        device = self._model.device
        random = torch.get_rng_state()
        device_random = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

        def restore() -> None:
            torch.set_rng_state(random)
            if device_random is not None:
                torch.cuda.set_rng_state(device_random, device)
            _set_training(flipped, not wanted)
            for module in checkpointing:
                module.gradient_checkpointing = True  # type: ignore[assignment]

        try:
            _set_training(flipped, bool(wanted))
            for module in checkpointing:
                module.gradient_checkpointing = False  # type: ignore[assignment]
            # Tensors kept from a call in inference mode could not be written to by a call outside of it.
            with torch.inference_mode(False), torch.no_grad(), _uncached_autocast(device.type), made_current(device):
                yield
        finally:
            restore_in_full(restore)

    @contextmanager
    def our_attention(self) -> Iterator[None]:
        """Inside, the model's layers call `liveroll.attention.interface.attention`."""
        self.own = self._attention.name
        own = self._own = self._attention.find(self.modules)
        self._ours = [(config, interface.NAME) for config, _ in self._own]
        with self._switched(self._ours, back=lambda: own):
            try:
                yield
            finally:
                # An interrupt may keep `own_attention` from its end until after this one, and ours is over then.
                self._ours = []

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        """Inside `our_attention`, the model's own implementation."""
        with self._switched(self._own, back=lambda: self._ours):
            yield

    @contextmanager
    def _switched(self, names: _Names, *, back: Callable[[], _Names]) -> Iterator[None]:
        try:
            self._attention.set(names)
            yield
        finally:
            restore_in_full(lambda: self._attention.set(back()))


def _set_training(modules: list[nn.Module], flag: bool) -> None:
    # The assignment of `nn.Module` looks whether it is given a parameter, which over a whole model takes milliseconds.
    for module in modules:
        if "training" in module.__dict__:
            object.__setattr__(module, "training", flag)
        else:  # kept elsewhere, as scripted and compiled modules do
            module.training = flag


def _uncached_autocast(device_type: str) -> AbstractContextManager[Any]:
    """The autocast of the caller, if any, without its cache: a captured step would go on reading the casts in it."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type), cache_enabled=False)
