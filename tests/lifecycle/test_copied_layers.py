"""Layers that were copied, and so read a configuration of their own."""

from __future__ import annotations

import copy

import pytest
import zoo
from rollouts import check, engine_of, prompts
from snapshots import raising
from torch import nn

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig


def layers_of(model):
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a_layer_replaced_by_its_copy(name):
    """Guards against a layer that goes on with its own attention, since it does not read the model's configuration."""
    model = zoo.build(name)
    engine = engine_of(model)
    check(engine, model, prompts(8))
    layers = layers_of(model)
    layers[1] = copy.deepcopy(layers[1])
    check(engine, model, prompts(8))
    assert engine.captures == 2
    check(engine, model, prompts(8))
    assert engine.captures == 2


@pytest.mark.parametrize("route", ["packed", "equal_width", "ordinary"])
def test_every_configuration_gets_its_own_attention_back(route):
    """Guards against a copied layer that is left with ours, or is given the model's."""
    model = zoo.build("llama")
    layers = layers_of(model)
    layers[1] = copy.deepcopy(layers[1])
    own = layers[1].self_attn.config
    own._attn_implementation = "eager"
    engine = RolloutEngine(model, config=RolloutConfig(prefill_route=route))
    sampling = SamplingConfig(max_new_tokens=6)
    found = [list(row.token_ids) for row in engine.generate(prompts(8), sampling).completions]
    assert found == [zoo.reference(model, row, max_new_tokens=6) for row in prompts(8)]
    assert (model.config._attn_implementation, own._attn_implementation) == ("sdpa", "eager")
    handle = model.lm_head.register_forward_hook(lambda *_: raising(KeyboardInterrupt())())
    with pytest.raises(KeyboardInterrupt):
        RolloutEngine(model, config=RolloutConfig(prefill_route=route)).generate(prompts(8), sampling)
    handle.remove()
    assert (model.config._attn_implementation, own._attn_implementation) == ("sdpa", "eager")
