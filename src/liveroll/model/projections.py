"""Projections of one input that could be one product, and what stands against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

# Kernels choose by the alignment of what they are given, and must choose for a part what they chose before.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Group:
    """Linear layers beside each other, in the order in which they lie together.

    Attributes:
        path: path of the module that they belong to.
        names: what they are called there.
        linears: the layers; inside adapters of PEFT, those that the adapters were put around.
    """

    path: str
    names: tuple[str, ...]
    linears: tuple[nn.Module, ...]

    def __str__(self) -> str:
        return f"{self.path}: {', '.join(self.names)}"

    def parameters(self, name: str) -> list[Tensor]:
        """The weights or the biases of the layers; empty where they have none."""
        found = [linear._parameters.get(name) for linear in self.linears]
        return [parameter for parameter in found if parameter is not None]


def find_groups(model: nn.Module) -> list[Group]:
    """All groups of a model but those of experts, which see some of the tokens each."""
    groups = []
    for path, module in model.named_modules():
        if "experts" in path.split("."):
            continue
        for names in _NAMES:
            children = [module._modules.get(name) for name in names]
            if all(children):
                groups.append(Group(path, names, tuple(_inside_adapter(child) for child in children if child)))
    return groups


def _inside_adapter(module: nn.Module) -> nn.Module:
    while (base := module._modules.get("base_layer")) is not None:
        module = base
    return module


def count_owners(modules: Sequence[nn.Module]) -> Mapping[int, int]:
    """How many parameters and buffers of the modules lie in each storage, by its address."""
    owners: Counter[int] = Counter()
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and type(tensor) in (Tensor, nn.Parameter):
                owners[tensor.untyped_storage().data_ptr()] += 1
    return owners


def foreign_layout(modules: Iterable[nn.Module]) -> str | None:
    """Why the memory of no parameter of the modules is the model's to move; None where it may be."""
    if any(isinstance(module, FSDPModule) for module in modules):
        return "fully_shard lays out the weights of the model"
    return None


def refusal(group: Group, owners: Mapping[int, int]) -> str | None:
    """Why the layers of a group cannot be one product, in words; None where they can.

    Args:
        group: the layers.
        owners: as `count_owners` counts them over the whole model.
    """
    for name, linear in zip(group.names, group.linears, strict=True):
        if more := does_more(linear):
            return f"{name} {more}"
    return next(_refusals(group, owners), None)


def does_more(linear: nn.Module) -> str | None:
    """What a layer does besides the product of its input and weight."""
    if type(linear) is not nn.Linear:
        return f"is a {type(linear).__name__} and not an nn.Linear"
    if "forward" in vars(linear):
        return "has been given a forward of its own"
    if linear._forward_hooks or linear._forward_pre_hooks:
        return "has forward hooks"
    return None


def _refusals(group: Group, owners: Mapping[int, int]) -> Iterator[str]:
    if len(group.parameters("bias")) not in (0, len(group.linears)):
        yield "some have a bias and others have none"
    for kind in ("weight", "bias"):
        parameters = group.parameters(kind)
        if kind == "weight" and len(parameters) < len(group.linears):
            yield "a weight is not a parameter, but computed from others"
        for name, parameter in zip(group.names, parameters, strict=False):
            if reason := _foreign(parameter) or tied(parameter, owners):
                yield f"{name}.{kind} {reason}"
        for aspect in ("dtype", "device"):
            if len({getattr(parameter, aspect) for parameter in parameters}) > 1:
                yield f"their {kind}s differ in {aspect}"
    weights = group.parameters("weight")
    if len({weight.shape[1:] for weight in weights}) > 1:
        yield "they take inputs of different sizes"
    if any(weight.nbytes % _ALIGNMENT for weight in weights):
        yield f"a weight would not begin on {_ALIGNMENT} bytes, which can change how training rounds"


def _foreign(parameter: Tensor) -> str | None:
    """Why the memory of a parameter is not the model's to move."""
    if "ds_id" in vars(parameter):
        return "is partitioned by ZeRO-3"
    if type(parameter) is not nn.Parameter:
        return f"is a {type(parameter).__name__}"
    if parameter.device.type not in ("cpu", "cuda"):
        return f"is on the device {parameter.device}"
    if parameter.is_inference():
        return "was made in inference mode"
    if not parameter.is_contiguous():
        return "is not contiguous"
    if parameter.untyped_storage().nbytes() != parameter.nbytes:
        return "lies in a larger storage, which somebody else laid out"
    if parameter.device.type == "cpu" and parameter.is_shared():
        return "lies in memory that is shared with other processes"
    return None


def tied(parameter: Tensor, owners: Mapping[int, int]) -> str | None:
    """Why a parameter is not alone in its storage; None where it is. `owners` is as for `refusal`."""
    shared = owners.get(parameter.untyped_storage().data_ptr(), 0) > 1
    return "is tied to another parameter" if shared else None
