"""Forward hooks around a captured step, and the models whose hooks must run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from liveroll.model.restore import restore_in_full

_TENSOR_PARALLEL = (
    "transformers.integrations.tensor_parallel",
    "transformers.distributed.",
    "torch.distributed.tensor.",
)
# ZeRO-3 wraps some of its hooks for a profiler.
_GATHERING = ("deepspeed.runtime.zero.", "deepspeed.utils.nvtx.", "torch.distributed.fsdp.")
_COMPUTING = ("torch.nn.utils.",)


def spans_ranks(hook: Any) -> bool:
    """Whether a hook is the part of a tensor-parallel layer that moves its input or output between ranks.

    It launches device work alone, so it belongs into a captured step as the layer does.
    """
    return _comes_from(hook, _TENSOR_PARALLEL)


def gathers_weights(hook: Any) -> bool:
    """Whether a hook gathers the weights of its module for a forward, or gives them up after it."""
    return _comes_from(hook, _GATHERING)


def computes_weights(hook: Any) -> bool:
    """Whether a hook computes a weight of its module before each forward.

    So does pruning, and so do those norms of weights that are no parametrization. Without the hook a forward would read
    the weight that the last forward with hooks made, or the memory where that one was.
    """
    # Methods of pruning are written as subclasses of torch's.
    return any(_comes_from(kind, _COMPUTING) for kind in type(hook).__mro__)


def _comes_from(hook: Any, places: tuple[str, ...]) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return f"{getattr(hook, '__module__', None)}.".startswith(places)


@contextmanager
def without_hooks(model: nn.Module, spare: Callable[[Any], bool] = spans_ranks) -> Iterator[None]:
    """Inside, modules of the model run those forward and forward-pre hooks only that are spared.

    Afterwards all of them are there. The Python of a hook would run while a step is captured and never when it is
    replayed, which tensor-parallel layers are made for and other hooks are not.

    Args:
        model: the model.
        spare: tells the hooks that run.
    """
    kept = []
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            kept.append((module, module._forward_hooks, module._forward_pre_hooks))

    def restore() -> None:
        for module, after, before in kept:
            module._forward_hooks, module._forward_pre_hooks = after, before

    try:
        for module, after, before in kept:
            module._forward_hooks, module._forward_pre_hooks = _spared(after, spare), _spared(before, spare)
        yield
    finally:
        restore_in_full(restore)


def _spared(hooks: Mapping[int, Any], spare: Callable[[Any], bool]) -> OrderedDict[int, Any]:
    return OrderedDict((key, hook) for key, hook in hooks.items() if spare(hook))


def needed_hooks(model: nn.Module, modules: Sequence[nn.Module], tensors: Sequence[Tensor | None]) -> str | None:
    """Why a model's hooks must run in every forward, so that its step cannot be captured; None where they need not.

    Args:
        model: the model.
        modules: all modules of it.
        tensors: all of its parameters, and what else it has.
    """
    # Asked for before each call, so that each look at a module or parameter counts.
    known_to_zero = [tensor for tensor in tensors if tensor is not None and "ds_id" in tensor.__dict__]
    if any(map(_is_partitioned, known_to_zero)):
        owner = next(name for name, parameter in model.named_parameters() if _is_partitioned(parameter))
        return f"{owner} is partitioned by ZeRO-3, whose hooks gather it in every forward"
    for module in modules:
        attributes = module.__dict__
        if attributes["_forward_pre_hooks"] or attributes["_forward_hooks"]:
            hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            if any(map(gathers_weights, hooks)):
                return f"hooks gather the weights of {_path(model, module)} in every forward"
            if any(map(computes_weights, hooks)):
                return f"hooks compute the weights of {_path(model, module)} in every forward"
        if "_hf_hook" in attributes:
            return f"accelerate moves the weights of {_path(model, module)} in every forward"
    return None


def _is_partitioned(tensor: Tensor) -> bool:
    """Whether ZeRO-3 knows a tensor and does not hold the whole of it here."""
    return bool(tensor.__dict__.get("ds_shape", tensor.shape) != tensor.shape)


def _path(model: nn.Module, wanted: nn.Module) -> str:
    return next(path for path, module in model.named_modules() if module is wanted) or "the model"
