"""What a captured decode step depends on, besides the values of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

    def difference(self, new: Signature, names: Sequence[str], names_now: Callable[[], Sequence[str]]) -> str | None:
        """What changed from this signature to a new one of the same model, in words; None where nothing did.

        Args:
            new: the other one.
            names: of this one's tensors, as `names_of` gave them.
            names_now: gives those of the new one's. They are asked for only where tensors are not as they were.
        """
        for name, value in new.settings.items():
            if self.settings.get(name) != value:
                return f"{name} changed from {self.settings.get(name)} to {value}"
        if self.tensors == new.tensors and self.absent == new.absent:
            return None
        before, after = self._by_name(names), new._by_name(names_now())
        for name in dict.fromkeys([*before, *after]):
            old, now = before.get(name), after.get(name)
            if old != now:
                if old is None or now is None:
                    return f"{name} was {'set' if old is None else 'removed'}"
                aspect, was, is_now = next(each for each in zip(_ASPECTS, old, now, strict=True) if each[1] != each[2])
                return f"{name} changed its {aspect} from {was} to {is_now}"
        return None

    def has_places_of(self, other: Signature) -> bool:
        """Whether the tensors of another signature lie where this one's do, in the same order."""
        return self.tensors[0] == other.tensors[0] and self.absent == other.absent

    def _by_name(self, names: Sequence[str]) -> dict[str, tuple[Any, ...] | None]:
        absent, present = {*self.absent}, zip(*self.tensors, strict=True)
        return {name: None if place in absent else next(present) for place, name in enumerate(names)}


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


def names_of(model: nn.Module) -> list[str]:
    """Names of all parameters and buffers, in the order of `tensors_of` over the modules of a walk."""
    paths = {id(module): path for path, module in model.named_modules()}
    names = []
    for module in walk(model):
        path = paths[id(module)]
        for name in (*module._parameters.keys(), *module._buffers.keys()):
            names.append(f"{path}.{name}" if path else name)
    return names
