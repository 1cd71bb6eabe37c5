"""What a rollout must leave as it found it, in a form that can be compared."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Describe the model and the random state of the process; equal snapshots mean that nothing changed."""
    return {
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "training": {name: module.training for name, module in model.named_modules()},
        "checkpointing": {
            name: module.gradient_checkpointing
            for name, module in model.named_modules()
            if hasattr(module, "gradient_checkpointing")
        },
        "hooks": {
            name: [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            for name, module in model.named_modules()
        },
        "attention": model.config._attn_implementation,
        "config": copy.deepcopy(vars(model.config)),
        "generation": (id(model.generation_config), copy.deepcopy(vars(model.generation_config))),
        "parameters": {name: _state(parameter) for name, parameter in model.named_parameters()},
        "buffers": {name: _state(buffer) for name, buffer in model.named_buffers()},
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "inference": torch.is_inference_mode_enabled(),
        "random": random.getstate(),
        "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        "torch": _bytes(torch.get_rng_state()),
    }


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    grad = None if not tensor.is_leaf or tensor.grad is None else _bytes(tensor.grad)
    where = (id(tensor), tensor.data_ptr(), tensor._version, tensor.is_inference())
    return (*where, tensor.requires_grad, grad, tensor.stride(), _bytes(tensor))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().flatten().contiguous().view(torch.uint8).numpy().tobytes()


@contextmanager
def left_as_found(model: PreTrainedModel) -> Iterator[None]:
    """Fail unless the block leaves the model and the random state as it found them, however it ends."""
    before = snapshot(model)
    try:
        yield
    finally:
        after = snapshot(model)
        changed = [key for key in before if before[key] != after[key]]
        assert not changed, f"{', '.join(changed)} changed"


class ForwardCounter:
    """Counts the forwards of a model while it is attached."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        self._handle = model.register_forward_pre_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1

    def __enter__(self) -> ForwardCounter:
        return self

    def __exit__(self, *_: Any) -> None:
        self._handle.remove()


class Trap:
    """Does something at the k-th forward of a module and nothing at any other.

    Args:
        module: where to wait.
        at: k, from 1.
        action: what to do.
        hook: as a forward hook, which captured steps leave out; otherwise in the place of the module's forward.
    """

    def __init__(self, module: nn.Module, at: int, action: Callable[[], Any], *, hook: bool = True) -> None:
        self.calls = 0
        self._at = at
        self._action = action
        self._module = module
        self._handle = module.register_forward_hook(self._step) if hook else None
        if not hook:
            forward = module.forward

            def stepping(*args: Any, **kwargs: Any) -> Any:
                self._step()
                return forward(*args, **kwargs)

            module.forward = stepping

    def _step(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == self._at:
            self._action()

    def remove(self) -> None:
        """Leave the module as it was."""
        if self._handle is None:
            del self._module.forward
        else:
            self._handle.remove()


def raising(error: BaseException) -> Any:
    """Give a function that raises `error`, whatever it is called with."""

    def act(*_: Any) -> None:
        raise error

    return act
