"""Models whose layers two ranks compute together roll out as in one process."""

from __future__ import annotations

import copy
import os
import tempfile
import warnings

import pytest
import torch
from ranks import WORLD
from rollouts import tokens
from scenarios import GREEDY, alone, batch_of, build, engine_of, prompts_of, roll_out, train
from torch import distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

from liveroll import RolloutConfig, RolloutEngine, UnsupportedModelError


def planned(rank):
    """Sharded by transformers' own plan."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    with tempfile.TemporaryDirectory() as own, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer releases would have the plan in an object
        folder = [own]
        dist.broadcast_object_list(folder)
        build().save_pretrained(folder[0], is_main_process=rank == 0)
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(folder[0], tp_plan="auto", dtype=torch.float32)
        dist.barrier()
        return model


def parallelized(rank, head=None, model=None, mesh=None):
    """Sharded by torch's hooks."""
    model = model or build()
    mesh = mesh or dist.init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        parallelize_module(layer, mesh, plan)
    return parallelize_module(model, mesh, {"lm_head": head or ColwiseParallel(output_layouts=Replicate())})


def rolled_out(make):
    def scenario(rank):
        model = make(rank)
        return roll_out(engine_of(model), prompts_of(0), lambda: train(model.train(), model.parameters(), batch_of(0)))

    return scenario


def moved(rank):
    """A parameter moves on rank 1, then one on rank 0, and then rank 1 has another module."""
    model = planned(rank)
    engine = engine_of(model)
    seen = []
    for call in range(4):
        projection = model.model.layers[1].mlp.down_proj
        if call == 2 - rank:
            projection.weight = torch.nn.Parameter(projection.weight.detach().clone())
        if call == 3 and rank == 1:
            model.model.norm = copy.deepcopy(model.model.norm)
        seen.append((tokens(engine.generate(prompts_of(0), GREEDY)), engine.captures))
    reasons = engine.recapture_reasons
    engine.shutdown()
    return seen, reasons


def divided(rank):
    """The head leaves each rank its part of the logits."""
    with pytest.raises(UnsupportedModelError) as refusal:
        engine_of(parallelized(rank, ColwiseParallel())).generate(prompts_of(0), GREEDY)
    return str(refusal.value)


def strangers(rank):
    """Ranks that hold different whole models are told to be one."""
    model = build()
    with torch.no_grad():
        model.lm_head.weight[0, 0] += rank
    with pytest.raises(UnsupportedModelError) as refusal:
        RolloutEngine(model, config=RolloutConfig(max_slots=4), tp_group=dist.group.WORLD).generate(prompts_of(0))
    return str(refusal.value)


SCENARIOS = {
    "planned": rolled_out(planned),
    "parallelized": rolled_out(parallelized),
    "moved": moved,
    "divided": divided,
    "strangers": strangers,
}


@pytest.fixture(scope="module")
def expected():
    return alone(prompts_of(0), [batch_of(0)])


@pytest.mark.parametrize("kind", ["planned", "parallelized"])
def test_layers_that_ranks_compute_together(outcomes, expected, kind):
    """Guards against captured steps without the hooks that move activations, and pages for the heads of all ranks."""
    whole = engine_of(build())
    whole.generate(prompts_of(0), GREEDY)
    for rolled in outcomes.of(kind):
        assert rolled.seen == expected
        assert rolled.stats.captures == 0
        assert rolled.as_captured == (True, None)
        assert rolled.kv == whole.memory().kv / WORLD


def test_a_weight_that_moves_on_one_rank_is_captured_again_on_both(outcomes, expected):
    """Guards against a signature that does not see where the local part of a distributed tensor lies.

    And against a rank that probes its model alone, after another module came into it.
    """
    for rank, (seen, reasons) in enumerate(outcomes.of("moved")):
        assert [rows for rows, _ in seen] == [expected[0][0]] * 4
        captures = [count for _, count in seen]
        assert captures == [captures[0] * times for times in (1, 2, 3, 4)]
        elsewhere = "another rank of the tensor-parallel group had to capture again"
        assert reasons[rank] == elsewhere
        assert reasons[1 - rank].startswith("model.layers.1.mlp.down_proj.weight changed its address from ")


def test_a_head_that_is_not_gathered_is_refused(outcomes):
    """Guards against each rank sampling from its part of the vocabulary."""
    for message in outcomes.of("divided"):
        assert "colwise_gather_output" in message


def test_ranks_that_hold_different_models_are_refused(outcomes):
    """Guards against ranks that sample different tokens and wait for one another for good."""
    for message in outcomes.of("strangers"):
        assert "different logits" in message


def test_all_ranks_leave(outcomes):
    """Guards against engines that keep a rank from leaving its group."""
    assert outcomes.all_ended
