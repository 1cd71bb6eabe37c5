"""Which projections of a model are one product in decode steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

from liveroll.errors import EngineStateError, FusionError
from liveroll.model.adjacency import lay_apart, lay_together, lie_together, was_laid
from liveroll.model.product import Forward, SharedProduct, replaced_forwards
from liveroll.model.projections import Group, count_owners, find_groups, foreign_layout, refusal, tied
from liveroll.model.signature import walk
from liveroll.types import RolloutFusion

logger = logging.getLogger("liveroll")

_Call = tuple[int, Tensor, int, type[nn.Module]]

_reading: dict[object, tuple[Fusion, PreTrainedModel]] = {}
"""The calls that are running or whose streams are open: captured steps of theirs know where the weights lie."""


class Fusion:
    """Lays the weights of projections together, and runs them as one product where that was asked for.

    Args:
        model: the model.
        fuse: whether to; `auto` leaves projections that cannot be fused.
    """

    def __init__(self, model: PreTrainedModel, fuse: bool | Literal["auto"]) -> None:
        self._model = model
        self._fuse = fuse
        self._found: dict[Group, str | None] = {}
        self._fresh = False
        self._products: dict[Group, SharedProduct] = {}
        self._refused: dict[Group, str] = {}

    @property
    def report(self) -> RolloutFusion:
        """What is fused, and what is not and why."""
        return RolloutFusion(tuple(map(str, self._products)), {str(group): why for group, why in self._refused.items()})

    @property
    def state(self) -> str:
        """What a captured step depends on, in a few words."""
        return f"{len(self._products)} ({hash(tuple(map(str, self._products)))})" if self._products else "none"

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Around one forward of the model, watch which layers are given the same input."""
        if self._fuse is False:
            yield
            return
        calls: dict[Group, list[_Call]] = {group: [] for group in find_groups(self._model)}
        linears: list[nn.Module] = []
        forwards: list[Forward] = []
        for group, seen in calls.items():
            for index, linear in enumerate(group.linears):
                if type(linear) is nn.Linear:
                    linears.append(linear)
                    forwards.append(_watch(linear, index, seen))
        with replaced_forwards(linears, forwards):
            yield
        self._found = {group: _misfit(group, seen) for group, seen in calls.items()}
        self._fresh = True

    def renew(self, *, moved: bool) -> bool:
        """Fuse what can be, if that has to be decided anew.

        Args:
            moved: parameters or buffers are not where they were the last time.

        Returns:
            Whether it was decided anew; parameters may then have moved, and others may be fused than before.

        Raises:
            FusionError: projections must be fused and cannot be; nothing has moved then.
        """
        if self._fuse is False or not (moved or self._fresh):
            return False
        modules = walk(self._model)
        owners, foreign = count_owners(modules), foreign_layout(modules)
        read = "a call of another engine reads them where they are" if self._read_by_others() else None
        reasons = {
            group: foreign or refusal(group, owners) or misfit or (read if _apart(group) else None)
            for group, misfit in self._found.items()
        }
        refused = {group: reason for group, reason in reasons.items() if reason is not None}
        if refused and self._fuse is True:
            group, reason = next(iter(refused.items()))
            raise FusionError(f"{group} cannot be fused: {reason}; set fuse='auto' or False to leave them apart")
        products = {group: _join(group) for group in self._found if group not in refused}
        if refused and refused != self._refused:
            logger.info("%d groups of projections are not fused; engine.fusion says why", len(refused))
        # What another call is in the way of is decided by the next.
        self._products, self._refused, self._fresh = products, refused, read is not None
        return True

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a call, keep other engines of the model from moving the weights."""
        token = object()
        try:
            _reading[token] = self, self._model
            yield
        finally:
            _reading.pop(token, None)

    def leave(self) -> None:
        """Let other engines move the weights, although streams of this one are still open."""
        for token, (reader, _) in list(_reading.items()):
            if reader is self:
                _reading.pop(token, None)

    def _read_by_others(self) -> bool:
        return any(model is self._model and reader is not self for reader, model in list(_reading.values()))

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside, fused projections are computed as one product."""
        products = [product for product in self._products.values() if product.applies()]
        linears = [linear for product in products for linear in product.linears]
        try:
            with replaced_forwards(linears, [forward for product in products for forward in product.forwards]):
                yield
        finally:
            for product in products:
                product.forget()

    def separate(self) -> None:
        """Give the parameters of fused projections memory of their own again; the next call fuses anew.

        Also those that another engine fused, which may be gone. What somebody else has laid out or tied since stays.

        Raises:
            EngineStateError: a call of another engine is running, or a stream of it open.
        """
        if self._read_by_others():
            raise EngineStateError(
                "another engine of this model is running, or a stream of it is still open, and reads the weights where "
                "they are; exhaust or close it first"
            )
        self._products = {}
        owners = count_owners(walk(self._model))
        for group in find_groups(self._model):
            for kind in ("weight", "bias"):
                lay_apart([p for p in group.parameters(kind) if was_laid(p) and not tied(p, owners)])


def _apart(group: Group) -> list[list[Tensor]]:
    """The weights, and the biases, of a group that do not lie together."""
    found = [group.parameters(kind) for kind in ("weight", "bias")]
    return [parameters for parameters in found if parameters and not lie_together(parameters)]


def _join(group: Group) -> SharedProduct:
    for parameters in _apart(group):
        lay_together(parameters)
    return SharedProduct(group)


def _watch(linear: nn.Linear, index: int, seen: list[_Call]) -> Forward:
    own = linear.forward

    def forward(input: Tensor) -> Tensor:
        # The version tells whether the input was changed in place between two layers.
        # So does the type, where a wrapper of the layer computes its weight for the length of a call.
        seen.append((index, input, input._version, type(linear)))
        return own(input)

    return forward


def _misfit(group: Group, seen: Sequence[_Call]) -> str | None:
    """Why the calls that were seen in a forward are not those of one product."""
    names = [group.names[index] for index, *_ in seen]
    if names != list(group.names):
        return f"a forward of the model called {', '.join(names) or 'none of them'}"
    first = seen[0]
    if any(given is not first[1] or version != first[2] for _, given, version, _ in seen):
        return "they are not given the same input"
    for name, (*_, kind) in zip(names, seen, strict=True):
        if kind is not nn.Linear:
            return f"{name} is a {kind.__name__} while it is called, and not an nn.Linear"
    return None
