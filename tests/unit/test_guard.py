"""The mode of a rollout, and that it ends with the rollout whatever interrupts it."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import pytest
import torch
import zoo
from snapshots import left_as_found

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig
from liveroll.model.guard import ModelGuard
from liveroll.model.restore import restore_in_full

PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=5)


@pytest.mark.parametrize("route", ["packed", "equal_width", "ordinary"])
def test_no_forward_tracks_gradients(route):
    """Guards against pages that hold on to the graph of all that was ever generated."""
    model = zoo.build("llama")
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    config = RolloutConfig(prefill_route=route, capture=False)
    RolloutEngine(model, config=config).generate(PROMPTS, SamplingConfig(max_new_tokens=3))
    assert len(seen) >= 3
    assert not any(seen)


def test_gradients_are_back_after_an_interrupt_while_they_are_put_back():
    """Guards against a Ctrl-C that hits torch's own restoring, after which no backward pass would work."""
    guard = ModelGuard(zoo.build("llama"), training=False)
    ending = torch.no_grad.__exit__.__code__

    def interrupt(frame, event, argument):
        if frame.f_code is ending:
            sys.settrace(None)
            raise KeyboardInterrupt

    before = sys.gettrace()
    try:
        with pytest.raises(KeyboardInterrupt), guard.rollout():
            sys.settrace(interrupt)
        assert torch.is_grad_enabled()
    finally:
        sys.settrace(before)
        torch.set_grad_enabled(True)


def test_the_models_gpu_is_the_current_one(monkeypatch):
    """Guards against kernels and events that go to another GPU than the one which the model is on."""
    model, current = zoo.build("llama"), []

    @contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(type(model), "device", torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda index: None)
    monkeypatch.setattr(torch.cuda, "device", device)
    with ModelGuard(model, training=False).rollout():
        assert current == [torch.device("cuda:1")]
    assert current == []


@pytest.mark.parametrize("route", ["packed", "equal_width"])
def test_checkpointing_in_training_mode(route):
    """Guards against checkpointed layers, which are given no cache while they train, and so keep no keys."""
    model = zoo.build("llama")
    expected = [zoo.reference(model, prompt, max_new_tokens=6) for prompt in PROMPTS]
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    model.train()
    rollouts = RolloutEngine(model, config=RolloutConfig(prefill_route=route, training_mode=True))
    with left_as_found(model):
        batch = rollouts.generate(PROMPTS, SamplingConfig(max_new_tokens=6))
    assert [list(completion.token_ids) for completion in batch.completions] == expected


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_a_scripted_module_is_put_into_the_mode_too():
    """Guards against dropout in a module whose training flag is not where others have it, and a flag left over it."""

    class Dropped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = torch.nn.Dropout(0.9)

        def forward(self, x: torch.Tensor):
            return self.dropout(x)

    model = zoo.build("llama")
    model.model.layers[0].mlp = torch.jit.script(Dropped())
    ids = torch.tensor([PROMPTS[0]])
    expected = model.eval()(ids).logits
    model.train()
    with ModelGuard(model, training=False).rollout():
        assert model(ids).logits.equal(expected)
    scripted = model.model.layers[0].mlp
    assert scripted.training
    assert "training" not in vars(scripted)
    assert not model(ids).logits.equal(expected)


def test_what_an_interrupt_stops_is_put_back_in_full():
    """Guards against a Ctrl-C in the middle of restoring, which leaves the rest as the rollout had it."""
    done = []

    def restore():
        done.append("first")
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append("second")

    with pytest.raises(KeyboardInterrupt):
        restore_in_full(restore)
    assert done == ["first", "first", "second"]
