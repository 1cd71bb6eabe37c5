"""The transformers model inside the wrappers that trainers put around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedModel

from liveroll.errors import UnsupportedModelError
from liveroll.model.restore import restore_in_full


def unwrap(model: Any) -> PreTrainedModel:
    """The causal language model inside DDP, DeepSpeed, PEFT and `torch.compile` wrappers.

    Raises:
        UnsupportedModelError: there is none.
    """
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "_orig_mod"):  # torch.compile
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):  # PEFT
            if getattr(inner.active_peft_config, "is_prompt_learning", False):
                raise UnsupportedModelError("prompt-learning adapters add virtual tokens that the engine does not feed")
            inner = inner.get_base_model()
        elif isinstance(inner, FullyShardedDataParallel):
            raise UnsupportedModelError(
                "FullyShardedDataParallel shards weights in a way that no forward of the model inside it can gather; "
                "use its successor, torch.distributed.fsdp.fully_shard",
                generates=False,
            )
        elif isinstance(getattr(inner, "module", None), nn.Module):  # DDP, DeepSpeed
            inner = inner.module
        else:
            raise UnsupportedModelError(
                f"{type(model).__name__} is not a transformers model, nor a known wrapper of one; "
                "pass the PreTrainedModel that is being trained"
            )
    return inner


@contextmanager
def uncompiled(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, modules that a trainer compiled by themselves, in place or in wrappers, run as they were written.

    They were compiled for the trainer's forwards. Ours would have them compiled again, and what is compiled hides from
    the probe which keys a layer stored.

    Args:
        modules: all modules of the model.
    """
    # One look at each module, since this is asked before each call.
    in_place = [module for module in modules if "_compiled_call_impl" in module.__dict__]
    kept: list[tuple[dict[str, Any], str, Any]] = [
        (module.__dict__, "_compiled_call_impl", None) for module in in_place
    ]
    if OptimizedModule in set(map(type, modules)):
        wrappers = [module for module in modules if isinstance(module, OptimizedModule)]
        kept += [(wrapper.__dict__, "forward", wrapper._orig_mod) for wrapper in wrappers]
    before = [(attributes, name, attributes[name]) for attributes, name, _ in kept]

    def restore() -> None:
        for attributes, name, value in before:
            attributes[name] = value

    try:
        for attributes, name, value in kept:
            attributes[name] = value
        yield
    finally:
        restore_in_full(restore)
