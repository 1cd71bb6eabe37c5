"""Projections that stay apart, each for a reason that is named, and tokens that are right all the same."""

from __future__ import annotations

import pytest
import torch
import zoo
from fused import attention, fused, weights
from rollouts import check, prompts, tokens
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from liveroll import FusionError
from liveroll.model.adjacency import lie_together

GROUP = "model.layers.0.self_attn: q_proj, k_proj, v_proj"
MLP = "model.layers.0.mlp: gate_proj, up_proj"


@pytest.fixture
def model():
    return zoo.build("qwen2")


def flatten(model):
    """Lay all parameters into one flat buffer, as DeepSpeed's ZeRO 1 and 2 do."""
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view(parameter.shape)


def tie(model):
    attention(model, 0).k_proj.weight.data = attention(model, 1).k_proj.weight.data


def tie_to_a_buffer(model):
    attention(model).register_buffer("alias", attention(model).v_proj.weight.data)


def drop_a_bias(model):
    attention(model).k_proj.bias = None


def transpose(model):
    with torch.no_grad():
        attention(model).q_proj.weight.transpose_(0, 1)


def share(model):
    attention(model).v_proj.weight.share_memory_()


def give_forward(model):
    layer = attention(model).k_proj
    layer.forward = lambda hidden: nn.Linear.forward(layer, hidden) * 0.5


class Halved(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) * 0.5


def subclass(model):
    attention(model).v_proj.__class__ = Halved


def normalise(model):
    parametrizations.weight_norm(attention(model).q_proj)


def compute(model):
    layer = attention(model).q_proj
    weight = layer.weight
    del layer.weight
    layer.register_parameter("raw", weight)
    layer.weight = weight.detach() * 0.5


class Tagged(nn.Parameter):
    pass


def tag(model):
    layer = attention(model).k_proj
    layer.weight = Tagged(layer.weight.detach())


def make_in_inference_mode(model):
    layer = attention(model).k_proj
    with torch.inference_mode():
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)


def hook(model):
    attention(model).q_proj.register_forward_hook(lambda module, given, output: given[0].mul_(0.5) * 0 + output)


def hook_before(model):
    attention(model).k_proj.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))


class Wrapped(nn.Module):
    """What an adapter might do with the layer that it was put around."""

    def __init__(self, layer, run):
        super().__init__()
        self.base_layer = layer
        self.run = run

    def forward(self, hidden):
        return self.run(self.base_layer, hidden)


def change_input(model):
    block = attention(model)
    block.k_proj = Wrapped(block.k_proj, lambda layer, hidden: layer(hidden * 0.5))


def change_in_place(model):
    block = attention(model)
    block.k_proj = Wrapped(block.k_proj, lambda layer, hidden: layer(hidden.mul_(0.5)))


def call_twice(model):
    block = attention(model)
    block.k_proj = Wrapped(block.k_proj, lambda layer, hidden: layer(hidden) - 0.5 * layer(hidden))


class Halving(nn.Module):
    def forward(self, weight):
        return weight * 0.5


def compute_meanwhile(model, applies=lambda: True):
    """Compute a weight for the length of each call, as PEFT does for `target_parameters`."""

    def run(layer, hidden):
        if not applies():
            return layer(hidden)
        parametrize.register_parametrization(layer, "weight", Halving())
        output = layer(hidden)
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        return output

    block = attention(model)
    block.k_proj = Wrapped(block.k_proj, run)


def never_call(model):
    block = attention(model)
    block.k_proj = Wrapped(block.k_proj, lambda layer, hidden: hidden[..., :16] * 0.5)


def addresses(module):
    return {name: parameter.data_ptr() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (flatten, "q_proj.weight lies in a larger storage, which somebody else laid out"),
        (tie, "k_proj.weight is tied to another parameter"),
        (tie_to_a_buffer, "v_proj.weight is tied to another parameter"),
        (drop_a_bias, "some have a bias and others have none"),
        (transpose, "q_proj.weight is not contiguous"),
        (share, "v_proj.weight lies in memory that is shared with other processes"),
        (give_forward, "k_proj has been given a forward of its own"),
        (subclass, "v_proj is a Halved and not an nn.Linear"),
        (normalise, "q_proj is a ParametrizedLinear and not an nn.Linear"),
        (compute, "a weight is not a parameter, but computed from others"),
        (tag, "k_proj.weight is a Tagged"),
        (make_in_inference_mode, "k_proj.weight was made in inference mode"),
        (hook, "q_proj has forward hooks"),
        (hook_before, "k_proj has forward hooks"),
        (change_input, "they are not given the same input"),
        (change_in_place, "they are not given the same input"),
        (call_twice, "a forward of the model called q_proj, k_proj, k_proj, v_proj"),
        (compute_meanwhile, "k_proj is a ParametrizedLinear while it is called, and not an nn.Linear"),
        (never_call, "a forward of the model called q_proj, v_proj"),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_stays_apart(model, change, reason, when):
    """Guards against fusing weights that somebody else has laid out, and layers that do more than a product."""
    engine = fused(model, fuse="auto", capture=False)
    if when == "after":
        check(engine, model, prompts(8))
        assert engine.fusion.refused == {}
    change(model)
    where = addresses(attention(model))
    check(engine, model, prompts(8))
    # Some changes move no tensor and no module. They are heeded in each step, and noted when something else changes.
    if when == "before" or change not in (give_forward, subclass, tag, hook, hook_before):
        assert engine.fusion.refused[GROUP] == reason
        assert GROUP not in engine.fusion.fused
        assert addresses(attention(model)) == where
        with pytest.raises(FusionError, match="cannot be fused"):
            check(fused(model), model, prompts(8))
    assert (MLP in engine.fusion.fused) == (change is not flatten)


@pytest.mark.parametrize("capture", ["auto", False])
def test_weights_computed_in_some_calls(capture):
    """Guards against the bare weights of a layer whose wrapper computed none while the model was looked at."""
    model, computed = zoo.build("llama"), [True]
    compute_meanwhile(model, lambda: bool(computed))
    model(torch.tensor(prompts(8)))  # which also changes the order of the layer's parameters
    computed.clear()
    engine = fused(model, capture=capture)
    before = tokens(check(engine, model, prompts(8)))
    computed.append(True)
    assert tokens(check(engine, model, prompts(8))) != before


def test_what_is_captured_depends_on_what_is_fused(model):
    """Guards against a captured product of layers that are refused now, although no tensor has moved."""
    engine = fused(model, fuse="auto")
    check(engine, model, prompts(8))
    change_input(model)
    check(engine, model, prompts(8))
    assert engine.captures == 2
    assert "fused projections changed from 4" in engine.recapture_reasons[0]


def test_weights_of_other_sizes():
    """Guards against parts that begin where training rounds in another way than it did."""
    engine = fused(zoo.build("qwen2", hidden_size=36, num_attention_heads=6, num_key_value_heads=1), fuse="auto")
    check(engine, engine._model, prompts(8))
    assert engine.fusion.refused[GROUP].startswith("a weight would not begin on 64 bytes")


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "up_proj"]])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_layers_inside_adapters(model, targets, dora):
    """Guards against adapters that are left out, and base weights that are merged beside the product."""
    peft = pytest.importorskip("peft")
    engine = fused(model)
    seen = [check(engine, model, prompts(8)).input_ids.tolist()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, use_dora=dora)
        adapted = peft.get_peft_model(model, config).eval()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        batch = check(engine, model, prompts(8))
        seen.append(batch.input_ids.tolist())
        adapted(input_ids=batch.input_ids, labels=batch.input_ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.captures == 2
    assert len(engine.fusion.fused) == 4
    layers = [getattr(layer, "base_layer", layer) for layer in attention(model).children()][:3]
    assert lie_together([layer.weight for layer in layers])
    with adapted.disable_adapter():
        assert check(engine, model, prompts(8)).input_ids.tolist() == seen[0]
    adapted.merge_adapter()
    last = check(engine, model, prompts(8)).input_ids.tolist()
    adapted.unmerge_adapter()
    check(engine, model, prompts(8))
    merged = adapted.merge_and_unload()
    assert check(engine, merged, prompts(8)).input_ids.tolist() == last
    assert lie_together(weights(model))
    assert len({str(rows) for rows in seen}) == len(seen)
