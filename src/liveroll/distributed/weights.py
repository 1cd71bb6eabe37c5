"""Weights that are sharded over ranks, brought to hand for a rollout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from liveroll.distributed.agreement import any_rank, bounds, check_agreement
from liveroll.distributed.exchange import gather_objects
from liveroll.distributed.fsdp2 import FullyShardedShards
from liveroll.distributed.in_step import in_step
from liveroll.distributed.zero3 import Zero3Shards
from liveroll.errors import EngineStateError, GatherError, UnsupportedModelError
from liveroll.kv.budget import free_bytes

logger = logging.getLogger("liveroll")

_SHARE = 0.8
"""Share of the free memory that gathered weights may take; the rest is for keys, values and activations."""


class Shards(Protocol):
    """Parameters of which each rank holds a part."""

    name: str
    layerwise_obstacle: str | None

    @property
    def groups(self) -> list[ProcessGroup]:
        """The ranks that hold them together."""
        ...

    @property
    def missing_bytes(self) -> int:
        """Bytes that gathering takes."""
        ...

    def gathered(self) -> AbstractContextManager[None]:
        """Inside, every rank holds all of them."""
        ...

    def layerwise(self) -> AbstractContextManager[None]:
        """Inside, hooks gather them in each forward."""
        ...


class ShardedWeights:
    """Brings the weights of a model to hand, if ranks hold them in parts.

    Args:
        given: the model, or the wrapper of it that the trainer runs.
        model: the model.
        gather: whether whole calls run on gathered weights; `auto` where memory allows.
        mode: puts the model into rollout mode, for forwards outside of a call.
    """

    def __init__(
        self,
        given: Any,
        model: PreTrainedModel,
        gather: bool | Literal["auto"],
        mode: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._given = given if isinstance(given, nn.Module) else model
        self._model = model
        self._gather = gather
        self._mode = mode
        self._divided = self._look() is not None

    def find(self) -> Shards | None:
        """The model's parameters as ranks hold them in parts; None where each rank holds them all.

        Raises:
            EngineStateError: the ranks can not bring them together any more.
        """
        if dist.is_initialized():
            return self._look()
        if self._divided:
            raise EngineStateError(
                "ranks hold the weights in parts, and their process group does not exist or has been destroyed; "
                "make the engine and its calls between init_process_group and destroy_process_group"
            )
        return None

    @property
    def ranks(self) -> int:
        """Ranks that hold the weights together."""
        shards = self.find()
        return 1 if shards is None else max(group.size() for group in shards.groups)

    @contextmanager
    def at_hand(self, meet: Callable[[], None] | None = None) -> Iterator[bool]:
        """Inside, forwards of the model have the weights that they need. All ranks must enter and leave together.

        Args:
            meet: waits until all ranks of a group are here, in a call over one; None where this rank waits for no other
                meanwhile, but in forwards.

        Yields:
            Whether ranks hold the weights in parts.

        Raises:
            RankError: `gather_weights` is not the same on all ranks.
            GatherError: it is True and the memory for it is not free on every rank; or they are not
                gathered, and forwards could not do that.
        """
        shards = self.find()
        if shards is None:
            yield False
            return
        obstacle = shards.layerwise_obstacle if meet is None else "ranks that wait for a group could not go on in step"
        if meet is not None:
            if self._gather is False:
                _refuse(obstacle)
            meet()
        if self._gathers(shards):
            with shards.gathered():
                yield True
        else:
            _refuse(obstacle)
            with shards.layerwise(), in_step(self._model, shards.groups, self._model.device, self._idle):
                yield True

    def refuse_stream(self) -> None:
        """Raise UnsupportedModelError where ranks hold the weights in parts.

        One that does not read on would let the others wait, and the model would not be the trainer's in between.
        """
        if (shards := self.find()) is not None:
            raise UnsupportedModelError(
                f"the weights are {shards.name}, and all ranks must run their calls to the end together; use generate"
            )

    def _look(self) -> Shards | None:
        return Zero3Shards.of(self._given, self._model) or FullyShardedShards.of(self._given, self._model)

    def _gathers(self, shards: Shards) -> bool:
        self._agree(shards.groups)
        if self._gather is False:
            return False
        needed, device = shards.missing_bytes, self._model.device
        free = free_bytes(device)
        short = needed > free * _SHARE
        for group in shards.groups:
            short = any_rank(short, group, device)
        if short and self._gather is True:
            raise GatherError(
                f"the weights are {shards.name}, and gathering them takes {needed} bytes, of which a rank has not "
                f"enough: here are {free} free, of which {_SHARE:.0%} may be used; set gather_weights=False to gather "
                "them layer by layer in every forward"
            )
        if short:
            logger.info("weights are gathered layer by layer: whole they take %d bytes of %d free", needed, free)
        return not short

    def _agree(self, groups: Sequence[ProcessGroup]) -> None:
        """Hold the ranks to one setting, or some would gather weights while others vote on forwards."""
        device = self._model.device
        least = most = ("auto", False, True).index(self._gather)
        for group in groups:
            least, most = bounds(least, most, group, device)
        if least == most:
            return
        # Through the groups of a mesh, one after the other, each rank hears of all.
        settings = {dist.get_rank(): {"RolloutConfig.gather_weights": repr(self._gather)}}
        for group in groups:
            for told in gather_objects(settings, group, device):
                settings |= told
        check_agreement(
            [settings.get(rank, {}) for rank in range(1 + max(settings))], "the group that holds the weights"
        )

    @torch.no_grad()
    def _idle(self) -> None:
        token = torch.zeros(1, 1, dtype=torch.int64, device=self._model.device)
        with self._mode():
            self._model(input_ids=token, position_ids=token, use_cache=False)


def _refuse(obstacle: str | None) -> None:
    if obstacle:
        raise GatherError(f"the weights must be gathered for the call, since {obstacle}")
