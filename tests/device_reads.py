"""Counting how often values are read from a device, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

_READS = {"cpu", "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "is_nonzero"}


class DeviceReads(TorchFunctionMode):
    """Takes tensors to live on a device, and all that is computed from them, until they are read to the host.

    Args:
        tensors: those that begin there; what `Tensor.to` gives is taken to be there too.

    Attributes:
        count: the reads inside the block.
    """

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.count = 0
        self._there = {id(tensor): tensor for tensor in tensors}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = any(id(tensor) in self._there for tensor in _tensors([*args, *(kwargs or {}).values()]))
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if there and name in _READS:
            self.count += 1
            # On a CPU the same tensor comes back; what is on the host now is another one.
            return result.clone() if isinstance(result, Tensor) else result
        if there or name == "to":
            self._there |= {id(tensor): tensor for tensor in _tensors([result])}
        return result


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
