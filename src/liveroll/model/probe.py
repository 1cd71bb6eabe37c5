"""One forward of one token that shows what a model's layers store and how they attend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from liveroll.attention import interface
from liveroll.distributed.tensor_parallel import check_logits
from liveroll.errors import UnsupportedModelError
from liveroll.model.geometry import AttentionTraits, LayerSpec, ModelShape
from liveroll.model.versions import cache_argument


class _RecordingCache(Cache):  # type: ignore[misc]
    """Remembers the keys and values that each layer gives it."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.given: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.given[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@dataclass
class _RecordingCall:
    """Remembers how each layer attends, and checks that it does so over what it stored."""

    cache: _RecordingCache
    specs: dict[int, LayerSpec]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: AttentionTraits,
        sinks: Tensor | None,
    ) -> Tensor:
        stored = self.cache.given.get(layer)
        if stored is None or stored[0].data_ptr() != key.data_ptr():
            raise UnsupportedModelError(f"attention layer {layer} attends to keys that it did not store")
        self.specs[layer] = LayerSpec(
            query.shape[2], key.shape[2], key.shape[3], value.shape[3], traits, sinks is not None
        )
        return query.new_zeros(*query.shape[:3], value.shape[3])


def probe(model: PreTrainedModel, tp_group: ProcessGroup | None = None) -> tuple[ModelShape, torch.dtype]:
    """Run one token through the model, its attention set to ours, and read the shapes off its real tensors.

    Head counts are therefore those of this process under tensor parallelism.

    Args:
        model: the model.
        tp_group: the ranks that hold it together and run this at the same time, or None.

    Returns:
        The shape of the model, and the dtype that holds its keys and values: under autocast they differ.

    Raises:
        UnsupportedModelError: a layer keeps state elsewhere than in the cache, or attends by other means; or the
            ranks would not sample the same tokens.
    """
    cache = _RecordingCache()
    call = _RecordingCall(cache, {})
    zeros = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with interface.bound(call):
        arguments = {cache_argument(model): cache, "use_cache": True}
        try:
            logits = model(input_ids=zeros, position_ids=zeros, **arguments).logits
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # A layer that stored its keys, attends by code of its own and finds no mask, or does not know our name.
            failed = sorted(set(cache.given) - set(call.specs))
            if not failed:
                raise
            raise _attends_otherwise(model, failed, f" ({type(error).__name__}: {error})") from error
    config = model.config.get_text_config()
    check_logits(logits, config.vocab_size, tp_group)
    expected = set(range(int(config.num_hidden_layers)))
    if set(call.specs) != expected or set(cache.given) != expected:
        odd = sorted(expected ^ set(call.specs)) or sorted(expected ^ set(cache.given))
        raise _attends_otherwise(model, odd, " over keys of the cache")
    limit = getattr(config, "max_position_embeddings", None)
    shape = ModelShape(tuple(call.specs[i] for i in sorted(expected)), logits.shape[-1], limit)
    return shape, torch.promote_types(*(tensor.dtype for tensor in cache.given[0]))


def _attends_otherwise(model: PreTrainedModel, layers: list[int], more: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} cannot be rolled out: its layers {layers} do not attend through transformers' "
        f"attention interface{more}"
    )
