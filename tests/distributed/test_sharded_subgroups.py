"""Four ranks of which each two hold a model's weights: they keep step with their partner, and with nobody else."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import zoo
from rollouts import tokens
from scenarios import GREEDY, SAMPLED, VOCAB_SIZE, build, engine_of
from test_tensor_parallel import parallelized
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from liveroll import RankError

PROCESSES = 4
PATIENCE = 150
"""Seconds; starting four processes takes long where there are fewer processors."""
LENGTHS = ([3, 11, 7, 2, 20], [5], [], [9, 4])
"""Of the prompts of each rank; ranks 0 and 1 are one group, ranks 2 and 3 the other."""
CALLS = (1, 1, 3, 3)
"""How often each rank generates: no group waits for the other."""


PAIRS = {"rows": ([0, 1], [2, 3]), "columns": ([0, 2], [1, 3])}


def prompts_of(rank):
    return zoo.ragged_prompts(VOCAB_SIZE, rank, LENGTHS[rank])


def changed(model, group):
    """Each group has weights of its own."""
    with torch.no_grad():
        if group:
            model.model.norm.weight.neg_()
    return model


def rolled_out(generate, rank):
    calls = []
    for call in range(CALLS[rank]):
        rows = prompts_of(rank) if call < 2 else prompts_of(rank ^ 1)
        calls.append([generate(rows, sampling) for sampling in (GREEDY, SAMPLED)])
    return calls


def in_step(model, rank):
    engine = engine_of(model, gather_weights=False, max_slots=2)
    return rolled_out(lambda rows, sampling: tokens(engine.generate(rows, sampling)), rank), engine.captures


def alone(rank):
    engine = engine_of(changed(build(), rank // 2))
    return rolled_out(lambda rows, sampling: tokens(engine.generate(rows, sampling)) if rows else [], rank)


def of_fully_shard(rank):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))["shard"]
    model = changed(build(), rank // 2)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return in_step(model, rank)


class Topology:
    """Tells DeepSpeed which two ranks share weights. The others of a rank would compute its layers with it."""

    def __init__(self, rank):
        pairs = {dimension: [dist.new_group(pair) for pair in PAIRS[dimension]] for dimension in PAIRS}
        self._rows, self._columns = pairs["rows"][rank // 2], pairs["columns"][rank % 2]

    def get_data_parallel_group(self):
        return self._rows

    def get_data_parallel_world_size(self):
        return self._rows.size()

    def get_data_parallel_rank(self):
        return self._rows.rank()

    def get_model_parallel_group(self):
        return self._columns

    def get_model_parallel_world_size(self):
        return self._columns.size()

    def get_model_parallel_rank(self):
        return self._columns.rank()


def of_zero3(rank):
    import test_deepspeed_shards as shards

    shards.prepare(rank, PROCESSES)
    trainer = shards.zero3(changed(build(), rank // 2), mpu=Topology(rank))
    outcome = in_step(trainer, rank)
    trainer.destroy()
    return outcome


def on_two_meshes(rank):
    """Ranks 0 and 1 compute layers together, and 2 and 3; the weights of each are sharded over ranks of both."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    seen = []
    for gather in (True, False):
        model = parallelized(rank, mesh=mesh["tp"])
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["data"])
        engine = engine_of(fully_shard(model, mesh=mesh["data"]), gather_weights=gather)
        seen.append([tokens(engine.generate(prompts_of(rank & 2), SAMPLED))])
        try:
            seen[-1].append(tokens(engine.generate([[1, rank]] if rank > 1 else prompts_of(0), GREEDY)))
        except RankError as error:
            seen[-1].append(str(error))
        seen[-1].append(tokens(engine.generate(prompts_of(rank & 2), GREEDY)))
    return seen


SCENARIOS = {"fully_shard": of_fully_shard, "two meshes": on_two_meshes}
if find_spec("deepspeed"):
    SCENARIOS["ZeRO-3"] = of_zero3


@pytest.mark.parametrize("kind", ["fully_shard", "ZeRO-3"])
def test_subgroups(outcomes, kind):
    """Guards against votes over all ranks, or over one where two hold the weights, and a partner left waiting."""
    if kind not in SCENARIOS:
        pytest.skip("needs DeepSpeed")
    for rank, (seen, captures) in enumerate(outcomes.of(kind)):
        assert seen == alone(rank)
        assert captures == 0


def test_layers_and_weights_divided_on_two_meshes(outcomes):
    """Guards against a tensor-parallel group that is not found behind tensors which are only sharded."""
    engine = engine_of(build())
    sampled, greedy = (tokens(engine.generate(prompts_of(0), sampling)) for sampling in (SAMPLED, GREEDY))
    for rank, seen in enumerate(outcomes.of("two meshes")):
        for first, odd, last in seen:
            if rank < 2:
                assert [first, odd, last] == [sampled, greedy, greedy]
            else:
                assert (first, last) == ([], [])
                assert odd.startswith(
                    "the ranks of the tensor-parallel group disagree about the prompts: rank 0 has 1 "
                )


def test_all_ranks_leave(outcomes):
    """Guards against a rank that waits for a group which has gone."""
    assert outcomes.all_ended
