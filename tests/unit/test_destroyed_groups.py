"""Engines, and groups that a caller still holds, after `destroy_process_group`: refused in words, and not used."""

from __future__ import annotations

import pytest
import zoo
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from liveroll import ConfigError, EngineStateError, RolloutEngine, SamplingConfig
from liveroll.distributed.lent import LentGroup

GREEDY = SamplingConfig(max_new_tokens=4)


@pytest.fixture
def begun():
    """Make a group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_that_is_still_held(begun):
    """Guards against collectives of a group that has ended, whose errors tell of a name that nobody gave."""
    group = dist.group.WORLD
    lent = LentGroup(group)
    engine = RolloutEngine(zoo.build("llama"))
    assert lent.get() is group
    assert len(engine.generate([[1, 2]], GREEDY, group=group)) == 1
    dist.destroy_process_group()
    with pytest.raises(EngineStateError, match="has been destroyed; make another engine"):
        lent.get()
    with pytest.raises(ConfigError, match="the group has been destroyed"):
        engine.generate([[1, 2]], GREEDY, group=group)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ConfigError, match="the group has been destroyed"):
        engine.generate([[1, 2]], GREEDY, group=group)


def test_layers_divided_among_ranks_that_are_gone(begun):
    """Guards against an error of torch's, from a mesh that the caller need not know of."""
    model = zoo.build("llama")
    parallelize_module(model, dist.init_device_mesh("cpu", (1,)), {"lm_head": ColwiseParallel()})
    dist.destroy_process_group()
    with pytest.raises(EngineStateError, match="make the engine between init_process_group and destroy_process_group"):
        RolloutEngine(model)


def test_weights_that_ranks_no_longer_bring_together(begun):
    """Guards against forwards out of step: hooks go on gathering after the group has ended, each rank by itself."""
    model = fully_shard(zoo.build("llama"))
    engine = RolloutEngine(model)
    assert len(engine.generate([[1, 2]], GREEDY)) == 1
    dist.destroy_process_group()
    for refused in (lambda: engine.generate([[1, 2]], GREEDY), lambda: RolloutEngine(model)):
        with pytest.raises(EngineStateError, match="ranks hold the weights in parts"):
            refused()
