"""Training with fused projections: same losses, same tensors for the trainer, same checkpoints."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import zoo
from fused import attention, fused, weights
from rollouts import check, engine_of, prompts, tokens
from safetensors.torch import load_file, save_file
from snapshots import left_as_found

from liveroll import SamplingConfig
from liveroll.model.adjacency import lie_together

IDS = torch.tensor(zoo.ragged_prompts(zoo.VOCAB_SIZE, 6, (12, 12)))


@pytest.fixture
def model():
    return zoo.build("qwen2")


def train(model, between, steps=4, **settings):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, **settings)
    losses = []
    for _ in range(steps):
        between()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_equal_states(one, other):
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "llama_tied", "gemma3", "opt", "gpt_oss"])
def test_training_is_the_same_to_the_bit(name, foreach):
    """Guards against gradients, optimizer states or products that depend on where the weights lie."""
    twin, model = zoo.build(name).train(), zoo.build(name).train()
    apart, engine = engine_of(twin), fused(model)
    expected = train(twin, lambda: check_mode(apart, twin), foreach=foreach)
    assert train(model, lambda: check_mode(engine, model), foreach=foreach) == expected
    assert_equal_states(model, twin)
    assert len(engine.fusion.fused) > 0
    assert engine.captures == 1
    check(engine, model.eval(), prompts(8))


def check_mode(engine, model):
    engine.generate(prompts(8), SamplingConfig(max_new_tokens=4))
    assert model.training
    assert not any("forward" in vars(module) for module in model.modules())


def test_training_half_precision_weights_from_masters():
    """Guards against masters that are copied into weights which the model no longer reads."""

    def run(fuse):
        model = zoo.build("llama").to(torch.bfloat16)
        masters = [p.detach().float().requires_grad_() for p in model.parameters()]
        optimizer = torch.optim.AdamW(masters, lr=0.02)
        engine = engine_of(model, fuse=fuse)
        losses = []
        for _ in range(4):
            engine.generate(prompts(8), SamplingConfig(max_new_tokens=4))
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.float()
            optimizer.step()
            model.zero_grad()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
            losses.append(loss.item())
        assert engine.captures == 1
        return losses, model

    apart, together = run(False), run(True)
    assert together[0] == apart[0]
    assert_equal_states(together[1], apart[1])
    assert lie_together(weights(together[1]))


def test_parameters_are_what_they_were(model):
    """Guards against an optimizer that goes on training tensors which the model has left."""
    before = dict(model.named_parameters())
    attention(model).k_proj.requires_grad_(False)
    model(input_ids=IDS, labels=IDS).loss.backward()
    gradients = {name: parameter.grad for name, parameter in before.items()}
    check(fused(model), model, prompts(8))
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(after[name].grad is gradient for name, gradient in gradients.items())
    assert [weight.requires_grad for weight in weights(model)] == [True, False, True]
    assert lie_together(weights(model))
    with left_as_found(model):
        check(fused(model), model, prompts(8))


def test_a_frozen_projection_stays(model):
    """Guards against a step that moves weights which were frozen, because they lie beside others."""
    attention(model).k_proj.requires_grad_(False)
    engine = fused(model)
    check(engine, model, prompts(8))
    frozen, trained = (weight.detach().clone() for weight in weights(model)[1:])
    train(model, lambda: None, steps=1)
    assert torch.equal(weights(model)[1], frozen)
    assert not torch.equal(weights(model)[2], trained)
    check(engine, model, prompts(8))
    assert engine.captures == 1


def test_a_loss_from_before_can_be_gone_back_over(model):
    """Guards against gradients of a graph that was made before the weights moved."""
    twin = copy.deepcopy(model)
    loss = model(input_ids=IDS, labels=IDS).loss
    check(fused(model), model, prompts(8))
    loss.backward()
    twin(input_ids=IDS, labels=IDS).loss.backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(parameter.grad, other.grad) for parameter, other in pairs)


def test_states_are_loaded_in_place(model):
    """Guards against a state that is loaded beside the weights, or costs a capture."""
    engine = fused(model)
    before = tokens(check(engine, model, prompts(8)))
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(zoo.build("qwen2", seed=1).state_dict())
    assert tokens(check(engine, model, prompts(8))) != before
    model.load_state_dict(state)
    assert tokens(check(engine, model, prompts(8))) == before
    assert engine.captures == 1


@pytest.mark.parametrize("name", ["qwen2", "llama_tied"])
def test_saving(name, tmp_path):
    """Guards against checkpoints that lack weights or hold some of them more than once."""
    model, twin = zoo.build(name), zoo.build(name)
    check(fused(model), model, prompts(8))
    model.save_pretrained(tmp_path / "model")
    assert_equal_states(type(model).from_pretrained(tmp_path / "model"), twin)
    states = {key: tensor for key, tensor in model.state_dict().items() if key != "lm_head.weight"}
    save_file(states, tmp_path / "state.safetensors")
    assert load_file(tmp_path / "state.safetensors").keys() == states.keys()
    assert saved_bytes(model.state_dict()) == saved_bytes(twin.state_dict())
    assert saved_bytes({"k": weights(model)[1]}) < saved_bytes({"q": weights(model)[0]})


def saved_bytes(state):
    file = io.BytesIO()
    torch.save(state, file)
    return len(file.getvalue())


def test_saving_with_accelerate(model, tmp_path):
    """Guards against the projections that accelerate drops where it takes them for one tensor."""
    accelerate = pytest.importorskip("accelerate")
    check(fused(model), model, prompts(8))
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[key], tensor) for key, tensor in model.state_dict().items())


def test_a_copy_is_independent(model):
    """Guards against a reference model that is trained along, because its weights lie in the same buffer."""
    check(fused(model), model, prompts(8))
    twin = copy.deepcopy(model)
    state = copy.deepcopy(twin.state_dict())
    train(model, lambda: None, steps=1)
    assert all(torch.equal(tensor, state[key]) for key, tensor in twin.state_dict().items())
    check(fused(twin), twin, prompts(8))
