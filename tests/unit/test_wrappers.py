"""Models inside wrappers: the engine finds the model, and runs the adapters that are in force."""

from __future__ import annotations

import pytest
import torch
import zoo
from snapshots import left_as_found
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.parallel import DistributedDataParallel

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig

ROUTES = ("packed", "equal_width", "per_prompt", "ordinary")
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=5)
GREEDY = SamplingConfig(max_new_tokens=8)


def tokens(batch):
    return [list(completion.token_ids) for completion in batch.completions]


def references(model):
    return [zoo.reference(model, prompt, max_new_tokens=8) for prompt in PROMPTS]


def refuse_to_compile(*_):
    raise AssertionError("the model was compiled")


@pytest.fixture
def process_group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("route", ROUTES)
def test_a_compiled_model(route):
    """Guards against a rollout that waits for a compilation, or a wrapper that is not looked into."""
    model = zoo.build("llama")
    rollouts = RolloutEngine(torch.compile(model, backend=refuse_to_compile), config=RolloutConfig(prefill_route=route))
    with left_as_found(model):
        assert tokens(rollouts.generate(PROMPTS, GREEDY)) == references(zoo.shared("llama"))


def compile_in_place(model):
    model.compile(backend=refuse_to_compile)


def compile_layers_in_place(model):
    for layer in model.model.layers:
        layer.compile(backend=refuse_to_compile)


def wrap_layers(model):
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend=refuse_to_compile)


@pytest.mark.parametrize("compile_for_training", [compile_in_place, compile_layers_in_place, wrap_layers])
@pytest.mark.parametrize("route", ["packed", "ordinary"])
def test_what_was_compiled_in_a_model(route, compile_for_training):
    """Guards against a model refused because a trainer compiled it in place or by layers, or one left uncompiled."""
    model = zoo.build("llama")
    compile_for_training(model)
    rollouts = RolloutEngine(model, config=RolloutConfig(prefill_route=route))
    with left_as_found(model):
        assert tokens(rollouts.generate(PROMPTS, GREEDY)) == references(zoo.shared("llama"))
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="the model was compiled"):
        model(torch.tensor([PROMPTS[0]]))


def test_a_distributed_model(process_group):
    """Guards against DDP, alone or under `torch.compile`, being taken for a model, or its hooks for the rollout's."""
    model = zoo.build("llama").train()
    wrapped = DistributedDataParallel(model)
    for outer in (wrapped, torch.compile(wrapped, backend=refuse_to_compile)):
        with left_as_found(model):
            assert tokens(RolloutEngine(outer).generate(PROMPTS, GREEDY)) == references(zoo.shared("llama"))
    ids = torch.tensor([PROMPTS[-1]])
    wrapped(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
