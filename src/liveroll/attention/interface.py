"""Our attention under transformers' public interface: registered by name, bound to one forward at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from liveroll.errors import UnsupportedModelError
from liveroll.model.geometry import AttentionTraits

NAME = "liveroll"

# Arguments that models pass along and that change nothing here: positions and masks are known from outside.
_WITHOUT_EFFECT = frozenset(
    {
        "position_ids",
        "cache_position",
        "position_embeddings",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "past_key_values",
        "cache",
        "is_causal",
        "kwargs",
    }
)


class AttentionCall(Protocol):
    """What attention means during one forward."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: AttentionTraits,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of one layer.

        Args:
            layer: index of the layer.
            query: `[B, T, query_heads, dim]`.
            key: `[B, T, kv_heads, dim]` of this forward's tokens.
            value: the same for values.
            traits: scale, window and soft-cap.
            sinks: `[query_heads]` logits of the attention sinks, or None.

        Returns:
            `[B, T, query_heads, value_dim]`.
        """
        ...


# Models in several threads may be rolled out at a time.
_bound: ContextVar[AttentionCall | None] = ContextVar("bound", default=None)


@contextmanager
def bound(call: AttentionCall) -> Iterator[None]:
    """Let every attention layer that runs inside, in this thread, use `call`."""
    before = _bound.set(call)
    try:
        yield
    finally:
        _bound.reset(before)


def current() -> AttentionCall:
    """What is bound.

    Raises:
        UnsupportedModelError: nothing is.
    """
    call = _bound.get()
    if call is None:
        raise UnsupportedModelError("the liveroll attention runs only inside a rollout; restore the model's own")
    return call


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention layer; shapes are `[B, heads, T, dim]`.

    Raises:
        UnsupportedModelError: the layer asks for something that is not known to be without effect here.
    """
    strange = [name for name, given in kwargs.items() if given is not None and name not in _WITHOUT_EFFECT]
    if strange:
        raise UnsupportedModelError(f"{type(module).__name__} passes {', '.join(strange)} to its attention")
    # Some models pass is_causal=False for a single token, to which it makes no difference.
    if query.shape[2] > 1 and not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise UnsupportedModelError(f"{type(module).__name__} is not causal")
    if dropout:
        raise UnsupportedModelError(
            f"{type(module).__name__} has attention dropout {dropout}; set training_mode=False or the dropout to 0"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if torch.compiler.is_compiling():
        from liveroll.attention.operator import attend

        output = attend(*rows, s_aux, layer, scale, sliding_window, softcap)
    else:
        output = current().attend(layer, *rows, AttentionTraits(scale, sliding_window, softcap), s_aux)
    return output, None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Masks are not made: which keys a token sees is known from its place in the batch."""


def register() -> None:
    """Make the implementation known to transformers under `NAME`."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _no_mask)
