"""PEFT's adapters inside models that ranks hold or compute in parts roll out as in one process."""

from __future__ import annotations

import warnings

import pytest
import torch
from packaging.version import Version
from ranks import WORLD
from rollouts import tokens
from scenarios import GREEDY, SAMPLED, build, engine_of, prompts_of
from test_fully_shard import is_sharded, sharded
from test_tensor_parallel import planned
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import __version__ as transformers_version

peft = pytest.importorskip("peft")

LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])


def adapt(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks for gradient checkpointing by the old name
        return peft.get_peft_model(model, LORA)


def draw(model, seed):
    """Give adapters the values of a seed, whatever part of them a rank has. B's are zeros when they are made."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                drawn = torch.randn(parameter.shape, generator=generator) / 4
                if isinstance(parameter, DTensor):
                    drawn = distribute_tensor(drawn, parameter.device_mesh, parameter.placements)
                parameter.copy_(drawn)


def rolled_out(engine, model, prompts):
    """Tokens over adapters of three kinds: two draws of values, and disabled ones."""
    seen = []
    for seed in (1, 2):
        draw(model, seed)
        seen.append([tokens(engine.generate(prompts, sampling)) for sampling in (GREEDY, SAMPLED)])
    with model.disable_adapter():
        seen.append([tokens(engine.generate(prompts, GREEDY))])
    return seen


def alone(prompts):
    model = adapt(build())
    seen = rolled_out(engine_of(model), model, prompts)
    assert len({str(rows[0]) for rows in seen}) == 3
    return seen


def adapted_by_plan(rank):
    """PEFT divides adapters as transformers' plan divides their layers."""
    return adapt(planned(rank))


def parallelized(rank):
    """Torch's hooks on the layers that PEFT made. A is whole where columns are divided, and B where rows are."""
    model = adapt(build())
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    for layer in model.get_base_model().model.layers:
        plan = {name: ColwiseParallel() for name in ("self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj")}
        for name in ("self_attn.q_proj", "self_attn.v_proj"):
            plan |= {f"{name}.base_layer": ColwiseParallel(), f"{name}.lora_B.default": ColwiseParallel()}
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan |= {f"{name}.base_layer": RowwiseParallel(), f"{name}.lora_A.default": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)
    parallelize_module(model.get_base_model(), mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    return model


def together(make):
    def scenario(rank):
        model = make(rank)
        engine = engine_of(model)
        seen = rolled_out(engine, model, prompts_of(0))
        stats = engine.generate(prompts_of(0), GREEDY).stats
        engine.shutdown()
        return seen, (stats.replays > 0, stats.eager_reason)

    return scenario


def in_parts(gather):
    def scenario(rank):
        model = adapt(build())
        sharded(model.get_base_model(), model if gather else None)
        engine = engine_of(model, gather_weights=gather)
        seen = rolled_out(engine, model, prompts_of(rank))
        left = is_sharded(model)
        engine.shutdown()
        return seen, left

    return scenario


SCENARIOS = {
    "parallelized": together(parallelized),
    "gathered": in_parts(True),
    "layer by layer": in_parts(False),
}
if Version(transformers_version) >= Version("5.4"):  # PEFT refuses models that older ones divided
    SCENARIOS["planned"] = together(adapted_by_plan)


@pytest.fixture(scope="module")
def expected():
    return [alone(prompts_of(rank)) for rank in range(WORLD)]


@pytest.mark.parametrize("kind", ["planned", "parallelized"])
def test_layers_that_ranks_compute_together(outcomes, expected, kind):
    """Guards against captured steps without the hooks of an adapter's layers, or with adapters of before."""
    if kind not in SCENARIOS:
        pytest.skip("PEFT needs transformers 5.4 for it")
    for seen, last in outcomes.of(kind):
        assert seen == expected[0]
        assert last == (True, None)


@pytest.mark.parametrize("kind", ["gathered", "layer by layer"])
def test_weights_that_ranks_hold_in_parts(outcomes, expected, kind):
    """Guards against adapters that are not gathered with the weights of their layers."""
    for rank, (seen, left) in enumerate(outcomes.of(kind)):
        assert seen == expected[rank]
        assert left


def test_all_ranks_leave(outcomes):
    """Guards against engines that keep a rank from leaving its group."""
    assert outcomes.all_ended
