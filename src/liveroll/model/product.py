"""One product in the place of several, behind the forwards that a model calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from liveroll.model.adjacency import span
from liveroll.model.projections import Group, does_more
from liveroll.model.restore import restore_in_full

Forward = Callable[[Tensor], Tensor]


class SharedProduct:
    """Forwards for the layers of a group: the first computes all outputs, the others hand out theirs.

    An output is handed out for the very tensor that the first layer was given, and in the order of the group; whatever
    a model calls otherwise is computed from the layer's own weight. So is what a layer gives that is no `nn.Linear`
    while it is called: PEFT parametrizes the weights of `target_parameters` for the length of each call.

    Args:
        group: layers whose weights lie together.
    """

    def __init__(self, group: Group) -> None:
        self.linears = group.linears
        self.forwards = [self._make_first(), *(self._make_later(i) for i in range(1, len(self.linears)))]
        self._kept: tuple[Tensor, tuple[Tensor, ...]] | None = None
        self._next = 0
        weights, biases = group.parameters("weight"), group.parameters("bias")
        self._sizes = [len(weight) for weight in weights]
        self._weight = span(weights)
        self._bias = span(biases) if biases else None
        self._addresses = self._read_addresses()

    def applies(self) -> bool:
        """Whether the weights are still where they were, and the layers do nothing else."""
        return self._read_addresses() == self._addresses and not any(map(does_more, self.linears))

    def forget(self) -> None:
        """Drop outputs that were not called for."""
        self._kept = None
        self._next = 0

    def _read_addresses(self) -> list[int]:
        parameters = [parameter for linear in self.linears for parameter in linear._parameters.values()]
        return [0 if parameter is None else parameter.data_ptr() for parameter in parameters]

    def _make_first(self) -> Forward:
        linear = cast(nn.Linear, self.linears[0])

        def forward(input: Tensor) -> Tensor:
            if type(linear) is not nn.Linear:
                return nn.Linear.forward(linear, input)
            outputs: tuple[Tensor, ...] = functional.linear(input, self._weight, self._bias).split(self._sizes, -1)
            self._kept = (input, outputs)
            self._next = 1
            return outputs[0]

        return forward

    def _make_later(self, index: int) -> Forward:
        last = index + 1 == len(self.linears)
        linear = cast(nn.Linear, self.linears[index])

        def forward(input: Tensor) -> Tensor:
            if self._kept is None or self._next != index or input is not self._kept[0] or type(linear) is not nn.Linear:
                return nn.Linear.forward(linear, input)
            output = self._kept[1][index]
            self._kept = None if last else self._kept
            self._next = 0 if last else index + 1
            return output

        return forward


@contextmanager
def replaced_forwards(modules: Sequence[nn.Module], forwards: Sequence[Forward]) -> Iterator[None]:
    """Inside, the modules compute something else; their hooks run as before."""
    before = [(vars(module), vars(module).get("forward")) for module in modules]

    def restore() -> None:
        for attributes, forward in before:
            if forward is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = forward

    try:
        for module, forward in zip(modules, forwards, strict=True):
            vars(module)["forward"] = forward
        yield
    finally:
        restore_in_full(restore)
