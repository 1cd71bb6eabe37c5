"""Weights that torch's `fully_shard` shards over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from liveroll.errors import UnsupportedModelError
from liveroll.model.hooks import gathers_weights, without_hooks
from liveroll.model.signature import walk
from liveroll.model.versions import abandon_forwards


class FullyShardedShards:
    """The parameters of a model, of which each rank holds a part.

    Args:
        given: the model, or the wrapper of it that the trainer runs.
        model: the model.
        units: what `fully_shard` was applied to, outermost first.

    Raises:
        UnsupportedModelError: by any attribute, where the parameters are offloaded.
    """

    name = "sharded by fully_shard"

    def __init__(self, given: nn.Module, model: nn.Module, units: Sequence[FSDPModule]) -> None:
        self._given = given
        self._units = units
        inside = set(map(id, walk(model)))
        outside = [type(unit).__name__ for unit in units if id(unit) not in inside]
        self.layerwise_obstacle = f"fully_shard was applied to a {outside[0]} around the model" if outside else None
        """Why forwards of the model alone would not gather all of its parameters; None where they do."""

    @classmethod
    def of(cls, given: nn.Module, model: nn.Module) -> FullyShardedShards | None:
        """The shards of a model; None where `fully_shard` was applied to no part of it."""
        units = [module for module in walk(given) if isinstance(module, FSDPModule)]
        return cls(given, model, units) if units else None

    @property
    def groups(self) -> list[ProcessGroup]:
        """The ranks that hold the parameters together, one group for each dimension of their mesh."""
        meshes = dict.fromkeys(parameter.device_mesh for parameter in self._sharded())
        groups = (mesh.get_group(dimension) for mesh in meshes for dimension in range(mesh.ndim))
        return list(dict.fromkeys(groups))

    @property
    def missing_bytes(self) -> int:
        """Bytes that gathering takes, at most."""
        return sum(parameter.nbytes for parameter in self._sharded())

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, every rank holds all parameters, and no hook reshards them after a forward.

        Raises:
            UnsupportedModelError: modules are to run in different dtypes, between which only the hooks cast.
        """
        before = {parameter.dtype for parameter in self._sharded()}
        try:
            for unit in self._units:
                unit.unshard()
            now = {
                parameter.dtype
                for module in walk(self._given)
                for parameter in module._parameters.values()
                if parameter is not None
            }
            if len(now) > 1 and not now <= before:
                raise UnsupportedModelError(
                    "fully_shard's mixed precision gives the modules of this model different dtypes, and only its "
                    "hooks cast between them; set gather_weights=False to run them"
                )
            with without_hooks(self._given, spare=lambda hook: not gathers_weights(hook)):
                yield
        finally:
            self._reshard()

    @contextmanager
    def layerwise(self) -> Iterator[None]:
        """Inside, hooks gather the parameters of each unit in each forward."""
        try:
            yield
        finally:
            self._reshard()

    def _sharded(self) -> list[DTensor]:
        # After a forward without a backward the root stays unsharded, and would go on with the weights of then.
        self._reshard()
        tensors: Iterator[Any] = (tensor for module in walk(self._given) for tensor in module._parameters.values())
        sharded = list(dict.fromkeys(tensor for tensor in tensors if isinstance(tensor, DTensor)))
        if any(tensor.device.type != tensor.device_mesh.device_type for tensor in sharded):
            raise UnsupportedModelError(
                "fully_shard offloads the weights to another device than computes them; give it no offload_policy",
                generates=False,
            )
        return sharded

    def _reshard(self) -> None:
        abandon_forwards(self._units)
        for unit in self._units:
            unit.reshard()
