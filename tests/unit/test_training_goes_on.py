"""Training beside rollouts: a step after one equals a step without one, in every mode a trainer runs in."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
import zoo
from gaps import greedy_gap
from snapshots import Trap, left_as_found, raising

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig, UnsupportedModelError

ROUTES = ("packed", "equal_width", "per_prompt", "ordinary")
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=5)
IDS = torch.tensor(zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=6, lengths=(12, 12)))
GREEDY = SamplingConfig(max_new_tokens=8)
BF16_GAP = 0.25  # logits of this size are rounded to 1/16, and many layers' roundings add up
SAMPLED = SamplingConfig(max_new_tokens=8, temperature=1.0)


def engine(model, route="packed", **settings):
    return RolloutEngine(model, config=RolloutConfig(prefill_route=route, page_size=4, **settings))


def tokens(batch):
    return [list(completion.token_ids) for completion in batch.completions]


def references(model, **kwargs):
    return [zoo.reference(model, prompt, max_new_tokens=8, **kwargs) for prompt in PROMPTS]


def checkpoint(model):
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()


def losses(model, between=lambda: None, steps=3):
    """Train for some steps with dropout, doing something else before each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(0)
    history = []
    for _ in range(steps):
        between()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    return history


@pytest.mark.parametrize("route", ROUTES)
def test_steps_between_rollouts_equal_steps_without(route):
    """Guards against a rollout that consumes random numbers, keeps a mode, or leaves tensors without gradients."""
    twin, model = (zoo.build("gpt2", resid_pdrop=0.2, embd_pdrop=0.2).train() for _ in range(2))
    for each in (twin, model):
        checkpoint(each)
    rollouts = engine(model, route)
    assert losses(model, lambda: rollouts.generate(PROMPTS, SAMPLED)) == losses(twin)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


def test_steps_after_broken_rollouts_equal_steps_without():
    """Guards against a step that runs with what an interrupted rollout left behind."""
    twin, model = (zoo.build("gpt2", resid_pdrop=0.2).train() for _ in range(2))
    rollouts = engine(model)

    def break_off():
        trap = Trap(model.transformer.h[1].mlp, 4, raising(KeyboardInterrupt()), hook=False)
        with pytest.raises(KeyboardInterrupt):
            rollouts.generate(PROMPTS, SAMPLED)
        trap.remove()

    assert losses(model, break_off) == losses(twin)


@pytest.mark.parametrize("route", ROUTES)
def test_no_inference_tensor_is_left_behind(route):
    """Guards against tensors that autograd refuses to save for the backward pass."""
    model = zoo.build("llama").train()
    engine(model, route).generate(PROMPTS, GREEDY)
    found = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    assert found
    assert not any(tensor.is_inference() for tensor in found)


@pytest.mark.parametrize("route", ROUTES)
def test_a_call_in_inference_mode_does_not_spoil_the_next(route):
    """Guards against pages allocated in inference mode, which nothing outside of it may write to."""
    model = zoo.build("llama")
    rollouts = engine(model, route)
    with torch.inference_mode():
        inside = tokens(rollouts.generate(PROMPTS, GREEDY))
    assert tokens(rollouts.generate(PROMPTS, GREEDY)) == inside == references(model)
    losses(model)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "gpt_oss"])
def test_gradient_checkpointing_with_inputs_that_require_gradients(name):
    """Guards against checkpointed layers that drop the cache, as they do for a model in training."""
    model = zoo.build(name).train()
    checkpoint(model)
    model.enable_input_require_grads()
    with left_as_found(model):
        assert tokens(engine(model).generate(PROMPTS, GREEDY)) == references(zoo.shared(name))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("route", ROUTES)
def test_autocast(route, name):
    """Guards against pages of one dtype given keys or values of another: under autocast layers mix them."""
    model = zoo.build(name)
    with torch.autocast("cpu", torch.bfloat16):
        responses = tokens(engine(model, route).generate(PROMPTS, GREEDY))
        gaps = [greedy_gap(model, *pair) for pair in zip(PROMPTS, responses, strict=True)]
    assert max(gaps) < BF16_GAP


def test_the_same_engine_in_and_out_of_autocast():
    """Guards against a dtype remembered from a call under autocast."""
    model = zoo.build("llama")
    rollouts = engine(model)
    expected = references(model)
    for _ in range(2):
        assert tokens(rollouts.generate(PROMPTS, GREEDY)) == expected
        with torch.autocast("cpu", torch.bfloat16):
            rollouts.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("route", ROUTES)
def test_a_forward_wrapped_by_the_trainer(route):
    """Guards against an autocast inside the model's forward, where a trainer's mixed precision puts it."""
    model = zoo.build("llama")
    plain = model.forward

    @functools.wraps(plain)
    def forward(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(*args, **kwargs)

    model.forward = forward
    with left_as_found(model):
        responses = tokens(engine(model, route).generate(PROMPTS, GREEDY))
    assert max(greedy_gap(model, *pair) for pair in zip(PROMPTS, responses, strict=True)) < BF16_GAP


@pytest.mark.parametrize("route", ROUTES)
def test_dropout_in_training_mode(route):
    """Guards against a training mode without dropout, or dropout that takes the trainer's random numbers."""
    model = zoo.build("gpt2", resid_pdrop=0.5)
    with left_as_found(model):
        dropped = tokens(engine(model, route, training_mode=True).generate(PROMPTS, GREEDY))
    assert dropped != tokens(engine(model, route).generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("route", ["packed", "equal_width", "per_prompt"])
def test_attention_dropout_in_training_mode_is_refused(route):
    """Guards against generating without a dropout that the model has."""
    model = zoo.build("gpt2", attn_pdrop=0.1).train()
    with left_as_found(model), pytest.raises(UnsupportedModelError, match=r"attention dropout 0\.1.*training_mode"):
        engine(model, route, training_mode=True).generate(PROMPTS, GREEDY)
    assert tokens(engine(model, route).generate(PROMPTS, GREEDY)) == references(model.eval())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype(dtype):
    """Guards against a tensor made in the default dtype, which scripts set while they build a model."""
    model = zoo.build("llama")
    sampling = SamplingConfig(
        max_new_tokens=6, min_new_tokens=2, stop_token_ids=(3,), temperature=1.0, top_k=9, repetition_penalty=1.1
    )
    expected = [tokens(engine(model, route).generate(PROMPTS, sampling)) for route in ROUTES]
    torch.set_default_dtype(dtype)
    try:
        assert [tokens(engine(model, route).generate(PROMPTS, sampling)) for route in ROUTES] == expected
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("route", ROUTES)
def test_another_default_device(route):
    """Guards against a tensor made on the default device instead of the model's."""
    model = zoo.build("llama")
    sampling = SamplingConfig(max_new_tokens=6, temperature=1.0, repetition_penalty=1.1)
    expected = tokens(engine(model, route).generate(PROMPTS, sampling))
    torch.set_default_device("meta")
    try:
        assert tokens(engine(model, route).generate(PROMPTS, sampling)) == expected
    finally:
        torch.set_default_device(None)
