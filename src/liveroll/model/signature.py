"""What a captured decode step depends on, besides the values of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_ASPECTS = ("address", "shape", "strides", "dtype", "device")


@dataclass(frozen=True)
class Signature:
    """Facts that a captured step has baked in.

    Attributes:
        tensors: address, shape, strides, dtype and device of every parameter and buffer, in the order of a walk.
        settings: everything else, by name.
    """

    tensors: tuple[tuple[Any, ...] | None, ...]
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, modules: Sequence[nn.Module], settings: Mapping[str, Any]) -> Signature:
        """The signature of a model as it is now.

        Called once a rollout, for models of a thousand modules and tensors in under a millisecond.

        Args:
            modules: all modules of the model, as `walk` lists them.
            settings: everything but tensors that a captured step depends on.
        """
        return cls(tuple(_facts(modules)), settings)

    def difference(self, new: Signature, model: nn.Module) -> str | None:
        """What changed from this signature to a new one of the same model, in words; None where nothing did."""
        for name, value in new.settings.items():
            if self.settings.get(name) != value:
                return f"{name} changed from {self.settings.get(name)} to {value}"
        if self.tensors == new.tensors:
            return None
        names = list(_names(model))
        if len(self.tensors) != len(new.tensors):
            return f"the model has {len(new.tensors)} parameters and buffers and had {len(self.tensors)}"
        for name, old, now in zip(names, self.tensors, new.tensors, strict=True):
            if old != now:
                if old is None or now is None:
                    return f"{name} was {'set' if old is None else 'removed'}"
                index = next(i for i, (a, b) in enumerate(zip(old, now, strict=True)) if a != b)
                return f"{name} changed its {_ASPECTS[index]} from {old[index]} to {now[index]}"
        return None


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


def _facts(modules: Sequence[nn.Module]) -> list[tuple[Any, ...] | None]:
    tensors: list[Tensor | None] = []
    for module in modules:
        if module._parameters:
            tensors.extend(module._parameters.values())
        if module._buffers:
            tensors.extend(module._buffers.values())
    if any(issubclass(kind, DTensor) for kind in set(map(type, tensors))):
        tensors = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return [None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in tensors]


def _names(model: nn.Module) -> Iterator[str]:
    paths = {id(module): path for path, module in model.named_modules()}
    for module in walk(model):
        path = paths[id(module)]
        for name in (*module._parameters, *module._buffers):
            yield f"{path}.{name}" if path else name
