"""Our attention as one operator, which `torch.compile` takes as it is.

What a forward's attention means is looked up when the operator runs, so compiled code depends on the model alone:
neither on pages nor on the engine they belong to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liveroll.attention import interface
from liveroll.model.geometry import AttentionTraits


@torch.library.custom_op("liveroll::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """`AttentionCall.attend` of the call that is bound when the operator runs."""
    return interface.current().attend(layer, query, key, value, AttentionTraits(scale, window, softcap), sinks)


@attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])
