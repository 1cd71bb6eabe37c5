"""Engines that fuse projections, and the projections of a small model."""

from __future__ import annotations

from typing import Any

from rollouts import engine_of
from torch import nn
from transformers import PreTrainedModel

from liveroll import RolloutEngine


def fused(model: Any, **settings: Any) -> RolloutEngine:
    """Make an engine whose projections must be fused."""
    return engine_of(model, **{"fuse": True, **settings})


def attention(model: PreTrainedModel, layer: int = 0) -> nn.Module:
    """Give the attention of a layer."""
    return model.model.layers[layer].self_attn


def projections(model: PreTrainedModel) -> list[nn.Module]:
    """Give the projections of the first layer, in the order of their group."""
    block = attention(model)
    return [block.q_proj, block.k_proj, block.v_proj]


def weights(model: PreTrainedModel) -> list[nn.Parameter]:
    """Give their weights."""
    return [layer.weight for layer in projections(model)]
