"""What a model's layers store and how they attend, read from the tensors of one tiny forward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionTraits:
    """How the scores of a layer are made.

    Attributes:
        scale: factor of the query-key products.
        window: keys that a token sees, itself included; None for all before it.
        softcap: scores s become `softcap * tanh(s / softcap)`; None leaves them.
    """

    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer, with the head counts that this process really computes."""

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    traits: AttentionTraits
    sinks: bool


@dataclass(frozen=True)
class ModelShape:
    """What the engine must know of a model.

    Attributes:
        layers: one for each attention layer, in order.
        vocab_size: width of the logits.
        max_positions: longest sequence the positions allow; None where they do not end.
    """

    layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_positions: int | None
