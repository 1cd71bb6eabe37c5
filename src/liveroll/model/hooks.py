"""Forward hooks around a captured step, and the models whose hooks must run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.tensor import DTensor

from liveroll.model.restore import restore_in_full


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, no module of the model runs its forward or forward-pre hooks; afterwards all of them are there.

    A hook's Python would run while a step is captured and never when it is replayed.
    """
    kept = []
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            kept.append((module, module._forward_hooks, module._forward_pre_hooks))

    def restore() -> None:
        for module, after, before in kept:
            module._forward_hooks, module._forward_pre_hooks = after, before

    try:
        for module, _, _ in kept:
            module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
        yield
    finally:
        restore_in_full(restore)


def needed_hooks(model: nn.Module, modules: Sequence[nn.Module]) -> str | None:
    """Why a model's hooks must run in every forward, so that its step cannot be captured; None where they need not.

    Args:
        model: the model.
        modules: all modules of it.
    """
    # Asked for before each call: names are looked up only where one is needed.
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if "ds_id" in vars(parameter):
                owner = _path(model, module, name)
                return f"{owner} is partitioned by ZeRO-3, whose hooks gather it in every forward"
            if isinstance(parameter, DTensor):
                owner = _path(model, module, name)
                return f"{owner} is a DTensor, whose module's hooks gather or redistribute it in every forward"
        if "_hf_hook" in vars(module):
            return f"accelerate moves the weights of {_path(model, module) or 'the model'} in every forward"
    return None


def _path(model: nn.Module, wanted: nn.Module, *name: str) -> str:
    path = next(path for path, module in model.named_modules() if module is wanted)
    return ".".join((path, *name) if path else name)
