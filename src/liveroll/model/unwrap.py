"""The transformers model inside the wrappers that trainers put around it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedModel

from liveroll.errors import UnsupportedModelError


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
