"""Weights that DeepSpeed's ZeRO-3 partitions over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from liveroll.model.hooks import gathers_weights, without_hooks
from liveroll.model.signature import walk


class Zero3Shards:
    """The parameters of a model, of which each rank holds a part.

    Args:
        given: the model, or the wrapper of it that the trainer runs.
        parameters: all parameters that ZeRO-3 knows.
    """

    name = "partitioned by ZeRO-3"
    layerwise_obstacle: str | None = None

    def __init__(self, given: nn.Module, parameters: Sequence[Any]) -> None:
        self._given = given
        self._parameters = parameters

    @classmethod
    def of(cls, given: nn.Module, model: nn.Module) -> Zero3Shards | None:
        """The shards of a model; None where ZeRO-3 knows none of its parameters."""
        known = [
            p for module in walk(given) for p in module._parameters.values() if p is not None and hasattr(p, "ds_id")
        ]
        return cls(given, known) if known else None

    @property
    def groups(self) -> list[ProcessGroup]:
        """The ranks that hold the parameters together."""
        return list(dict.fromkeys(parameter.ds_process_group for parameter in self._parameters))

    @property
    def missing_bytes(self) -> int:
        """Bytes that gathering takes."""
        return sum(parameter.ds_numel * parameter.element_size() for parameter in self._partitioned())

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, every rank holds all parameters, and no hook partitions them after a forward."""
        from deepspeed import zero

        with (
            zero.GatheredParameters(self._partitioned()),
            without_hooks(self._given, spare=lambda h: not gathers_weights(h)),
        ):
            yield

    @contextmanager
    def layerwise(self) -> Iterator[None]:
        """Inside, hooks gather the parameters of each layer in each forward."""
        yield

    def _partitioned(self) -> list[Any]:
        return [parameter for parameter in self._parameters if parameter.shape != parameter.ds_shape]
