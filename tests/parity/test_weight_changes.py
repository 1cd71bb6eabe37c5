"""Weights that change between two calls: the next call generates what `model.generate` does with the new ones."""

from __future__ import annotations

import copy

import pytest
import torch
import zoo
from gaps import greedy_gap
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from liveroll import LogitsError, RolloutConfig, RolloutEngine, SamplingConfig

ROUTES = ("packed", "equal_width", "per_prompt", "ordinary")
BUDGET = 12
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=11)
GREEDY = SamplingConfig(max_new_tokens=BUDGET)

pytestmark = pytest.mark.parametrize("route", ROUTES)


def engine(model, route):
    return RolloutEngine(model, config=RolloutConfig(prefill_route=route, page_size=4, max_slots=2))


def tokens(batch):
    return [list(completion.token_ids) for completion in batch.completions]


def references(model, **kwargs):
    return [zoo.reference(model, prompt, max_new_tokens=BUDGET, **kwargs) for prompt in PROMPTS]


def rolled_before_and_after(model, route, change):
    """Roll out, change the model, and roll out again with the same engine; the references of both."""
    rollouts = engine(model, route)
    before = tokens(rollouts.generate(PROMPTS, GREEDY))
    assert before == references(model)
    change()
    after = tokens(rollouts.generate(PROMPTS, GREEDY))
    assert after == references(model)
    return before, after


def step(model):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ids = torch.tensor([PROMPTS[-1]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "gemma3"])
def test_an_optimizer_step(name, route):
    """Guards against keys, values or weights kept from before the step."""
    model = zoo.build(name)
    before, after = rolled_before_and_after(model, route, lambda: step(model))
    assert before != after


def test_a_loaded_state(route):
    """Guards against weights read before a checkpoint was loaded over them."""
    model, other = zoo.build("llama"), zoo.build("llama", seed=1)
    before, after = rolled_before_and_after(model, route, lambda: model.load_state_dict(other.state_dict()))
    assert before != after


def test_assigned_tensors(route):
    """Guards against the old tensors being held when a state is assigned instead of copied."""
    model, other = zoo.build("llama"), zoo.build("llama", seed=1)
    before, after = rolled_before_and_after(
        model, route, lambda: model.load_state_dict(other.state_dict(), assign=True)
    )
    assert before != after


def test_a_replaced_parameter_and_module(route):
    """Guards against a reference to a parameter or module that the model no longer has."""
    model, other = zoo.build("llama"), zoo.build("llama", seed=1)

    def change():
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
        model.model.layers[1].mlp = other.model.layers[1].mlp
        model.model.layers[0].self_attn.q_proj = other.model.layers[0].self_attn.q_proj

    before, after = rolled_before_and_after(model, route, change)
    assert before != after


def test_another_dtype_and_back(route):
    """Guards against pages kept in the dtype the model had before."""
    model = zoo.build("llama")
    rollouts = engine(model, route)
    first = tokens(rollouts.generate(PROMPTS, GREEDY))
    weights = copy.deepcopy(model.state_dict())
    model.to(torch.bfloat16)
    responses = tokens(rollouts.generate(PROMPTS, GREEDY))
    assert max(greedy_gap(model, *pair) for pair in zip(PROMPTS, responses, strict=True)) < 0.25
    model.to(torch.float32)
    model.load_state_dict(weights)
    assert tokens(rollouts.generate(PROMPTS, GREEDY)) == first == references(model)


def test_weights_that_were_not_finite(route):
    """Guards against a diverged step whose NaNs stay in the pages: masked with a weight of 0 they are NaN again."""
    model = zoo.build("llama")
    rollouts = engine(model, route)
    good = copy.deepcopy(model.state_dict())
    for bad in (float("nan"), float("inf")):
        for parameter in model.parameters():
            parameter.data.fill_(bad)
        with pytest.raises(LogitsError):
            rollouts.generate(PROMPTS, GREEDY)
        model.load_state_dict(good)
        assert tokens(rollouts.generate(PROMPTS, GREEDY)) == references(model)


def test_a_layer_of_another_model(route):
    """Guards against a layer that keeps its own attention, since it follows the configuration it came with."""
    model, other = zoo.build("llama"), zoo.build("llama", seed=1)
    rollouts = engine(model, route)
    rollouts.generate(PROMPTS, GREEDY)
    model.model.layers[1] = other.model.layers[1]
    assert tokens(rollouts.generate(PROMPTS, GREEDY)) == references(model)


@pytest.mark.filterwarnings("ignore")
def test_a_larger_vocabulary(route):
    """Guards against histories for penalties as wide as the vocabulary was at the first call."""
    model = zoo.build("llama")
    rollouts = engine(model, route)
    rollouts.generate(PROMPTS, GREEDY)
    model.resize_token_embeddings(zoo.VOCAB_SIZE + 8, mean_resizing=False)
    prompts = [[*prompt, zoo.VOCAB_SIZE + 7] for prompt in PROMPTS]
    batch = rollouts.generate(prompts, SamplingConfig(max_new_tokens=BUDGET, repetition_penalty=1.3))
    expected = [zoo.reference(model, prompt, max_new_tokens=BUDGET, repetition_penalty=1.3) for prompt in prompts]
    assert tokens(batch) == expected


def test_another_attention_implementation(route):
    """Guards against padded prompts attending by the implementation that the engine found when it was made."""
    calls = 0

    def attend(*args, **kwargs):
        nonlocal calls
        calls += 1
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("counted", attend)
    AttentionMaskInterface.register("counted", sdpa_mask)
    model = zoo.build("llama")
    rollouts = engine(model, route)
    expected = tokens(rollouts.generate(PROMPTS, GREEDY))
    model.set_attn_implementation("counted")
    assert tokens(rollouts.generate(PROMPTS, GREEDY)) == expected
    assert bool(calls) == (route != "packed")
    assert model.config._attn_implementation == "counted"
