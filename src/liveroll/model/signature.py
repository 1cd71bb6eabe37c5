"""What a captured decode step depends on, besides the values of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_ASPECTS: dict[str, Callable[[Tensor], Any]] = {
    "address": Tensor.data_ptr,
    "shape": Tensor.size,
    "strides": Tensor.stride,
    "dtype": attrgetter("dtype"),
    "device": attrgetter("device"),
}


@dataclass(frozen=True)
class Signature:
    """Facts that a captured step has baked in.

    Attributes:
        tensors: address, shape, strides, dtype and device, each of every parameter and buffer that is not None.
        absent: places of those that are None.
        settings: everything else, by name.
    """

    tensors: tuple[tuple[Any, ...], ...]
    absent: tuple[int, ...]
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], settings: Mapping[str, Any]) -> Signature:
        """The signature of a model as it is now.

        Called once a rollout, for models of a thousand tensors in under a millisecond.

        Args:
            tensors: the model's, as `tensors_of` lists them.
            settings: everything but tensors that a captured step depends on.
        """
        absent = tuple(place for place, tensor in enumerate(tensors) if tensor is None)
        present = [tensor for tensor in tensors if tensor is not None]
        if any(issubclass(kind, DTensor) for kind in set(map(type, present))):
            present = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in present]
        return cls(tuple(tuple(map(look, present)) for look in _ASPECTS.values()), absent, settings)

    def difference(self, new: Signature, model: nn.Module) -> str | None:
        """What changed from this signature to a new one of the same model, in words; None where nothing did."""
        for name, value in new.settings.items():
            if self.settings.get(name) != value:
                return f"{name} changed from {self.settings.get(name)} to {value}"
        if self.tensors == new.tensors and self.absent == new.absent:
            return None
        if self.count != new.count:
            return f"the model has {new.count} parameters and buffers and had {self.count}"
        names = list(_names(model))
        if came_or_went := {*self.absent} ^ {*new.absent}:
            place = min(came_or_went)
            return f"{names[place]} was {'set' if place in self.absent else 'removed'}"
        present = [name for place, name in enumerate(names) if place not in self.absent]
        for aspect, before, after in zip(_ASPECTS, self.tensors, new.tensors, strict=True):
            for name, old, now in zip(present, before, after, strict=True):
                if old != now:
                    return f"{name} changed its {aspect} from {old} to {now}"
        return None

    @property
    def count(self) -> int:
        """Parameters and buffers."""
        return len(self.tensors[0]) + len(self.absent)


def walk(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, in the order of `nn.Module.modules`.

    The generators of `nn.Module` build the name of everything that they visit, which takes a large model longer than
    all else that happens around a rollout.
    """
    found: dict[nn.Module, None] = {model: None}

    def visit(module: nn.Module) -> None:
        for child in module._modules.values():
            if child is not None and child not in found:
                found[child] = None
                if child._modules:
                    visit(child)

    visit(model)
    return list(found)


def tensors_of(modules: Sequence[nn.Module]) -> list[Tensor | None]:
    """The parameters and then the buffers of each module; None where one is not there."""
    tensors: list[Tensor | None] = []
    for module in modules:
        if module._parameters:
            tensors += module._parameters.values()
        if module._buffers:
            tensors += module._buffers.values()
    return tensors


def _names(model: nn.Module) -> Iterator[str]:
    paths = {id(module): path for path, module in model.named_modules()}
    for module in walk(model):
        path = paths[id(module)]
        for name in (*module._parameters, *module._buffers):
            yield f"{path}.{name}" if path else name
