"""With fused projections, greedy tokens are those of `model.generate` and of separate ones, in fp32."""

from __future__ import annotations

import re

import pytest
import torch
import zoo

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig

BUDGET = 16
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=11)
GREEDY = SamplingConfig(max_new_tokens=BUDGET)
ATTENTION, MLP = "self_attn: q_proj, k_proj, v_proj", "mlp: gate_proj, up_proj"

# What there is to fuse in each layer.
LAYERS = {
    **dict.fromkeys(zoo.ARCHITECTURES, (ATTENTION, MLP)),
    **dict.fromkeys(("opt", "glm4", "mixtral", "qwen3_moe", "gpt_oss"), (ATTENTION,)),
    **dict.fromkeys(("phi3", "gpt2", "gpt_neox"), ()),
}


def tokens(batch):
    return [list(completion.token_ids) for completion in batch.completions]


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_every_architecture(name, monkeypatch):
    """Guards against parts of a product that are mixed up, and against projections that run on their own after all."""
    model = zoo.build(name)
    apart = RolloutEngine(model, config=RolloutConfig(max_slots=4)).generate(PROMPTS, GREEDY)
    engine = RolloutEngine(model, config=RolloutConfig(max_slots=4, fuse=True, capture=False))
    products = count_products(monkeypatch)
    fused = engine.generate(PROMPTS, GREEDY)
    assert tokens(fused) == tokens(apart)
    assert tokens(fused) == [zoo.reference(model, prompt, max_new_tokens=BUDGET) for prompt in PROMPTS]
    layers = model.config.num_hidden_layers
    found = [re.sub(r".*layers\.\d+\.", "", group) for group in engine.fusion.fused]
    assert sorted(found) == sorted(LAYERS[name] * layers)
    assert engine.fusion.refused == {}
    assert sum(products) == len(found) * fused.stats.decode_steps


def count_products(monkeypatch):
    """Every output of a decode step that was computed for a whole group."""
    counted = []
    split = torch.Tensor.split

    def counting(tensor, sizes, dim=0):
        counted.append(isinstance(sizes, list) and dim == -1)
        return split(tensor, sizes, dim)

    monkeypatch.setattr(torch.Tensor, "split", counting)
    return counted
