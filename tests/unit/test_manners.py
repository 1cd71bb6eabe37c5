"""The engine leaves the model and the process exactly as found, whichever way a call ends."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
import zoo
from snapshots import ForwardCounter, Trap, left_as_found, raising, snapshot

from liveroll import EngineStateError, RolloutConfig, RolloutEngine, SamplingConfig

ROUTES = ("packed", "bucketed", "equal_width", "per_prompt", "ordinary", "auto")
BUDGET = 8
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=5)
EXPECTED = [zoo.reference(zoo.shared("llama"), prompt, max_new_tokens=BUDGET) for prompt in PROMPTS]
GREEDY = SamplingConfig(max_new_tokens=BUDGET)


class BrokenForwardError(Exception):
    pass


def model_in_training(attention="sdpa"):
    """A model as a trainer holds it: mixed flags, frozen parts, checkpointing, no cache, a hook."""
    model = zoo.build("llama")
    model.set_attn_implementation(attention)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    model.train()
    model.model.layers[0].eval()
    model.model.norm.eval()
    model.model.embed_tokens.requires_grad_(False)
    model.config.use_cache = False
    model.lm_head.register_forward_hook(lambda *_: None)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    return model


def engine(model, route="packed", capture="auto"):
    config = RolloutConfig(prefill_route=route, page_size=4, max_slots=2, capture=capture)
    return RolloutEngine(model, config=config)


def tokens(batch):
    return [list(completion.token_ids) for completion in batch.completions]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("capture", ["auto", False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_call_leaves_the_model_as_found(route, attention, capture):
    """Guards against a training flag, switch, hook, random state or attention that a call forgets to put back."""
    model = model_in_training(attention)
    rollouts = engine(model, route, capture)
    with left_as_found(model):
        assert tokens(rollouts.generate(PROMPTS, GREEDY)) == EXPECTED
        rollouts.generate(PROMPTS, SamplingConfig(max_new_tokens=BUDGET, temperature=1.0))


def test_the_snapshot_notices():
    """Guards against the comparison of this file comparing nothing."""
    model = model_in_training()
    changes = {
        "training": lambda: model.model.norm.train(),
        "checkpointing": lambda: setattr(model.model.layers[0], "gradient_checkpointing", False),
        "hooks": lambda: model.register_forward_hook(lambda *_: None),
        "attention, config": lambda: model.set_attn_implementation("eager"),
        "config": lambda: setattr(model.config, "use_cache", True),
        "generation": lambda: setattr(model.generation_config, "top_k", 3),
        "parameters": lambda: model.lm_head.weight.data.mul_(2),
        "attributes": lambda: setattr(model, "mine", 1),
        "random": random.random,
        "numpy": np.random.rand,
        "torch": lambda: torch.rand(1),
    }
    for name, change in changes.items():
        with pytest.raises(AssertionError, match=f"^{name} changed"), left_as_found(model):
            change()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("error", [BrokenForwardError(), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("at", [1, 2, 4], ids=["first", "prefill", "decode"])
@pytest.mark.parametrize("route", ROUTES)
def test_an_error_inside_a_forward(route, at, error):
    """Guards against a model left in rollout mode, or an engine left busy, by a forward that fails."""
    model = model_in_training()
    rollouts = engine(model, route, capture=False)
    trap = Trap(model.model.layers[1].mlp, at, raising(error))
    with left_as_found(model), pytest.raises(type(error)):
        rollouts.generate(PROMPTS, GREEDY)
    assert trap.calls == at
    with left_as_found(model):
        assert tokens(rollouts.generate(PROMPTS, GREEDY)) == EXPECTED


def test_an_interrupt_inside_a_capture():
    """Guards against a step that was captured in part being replayed, or its module staying without hooks."""
    model = model_in_training()
    rollouts = engine(model)
    trap = Trap(model.model.layers[1].mlp, 3, raising(KeyboardInterrupt()), hook=False)
    with left_as_found(model), pytest.raises(KeyboardInterrupt):
        rollouts.generate(PROMPTS, GREEDY)
    assert (trap.calls, rollouts.captures) == (3, 0)
    assert tokens(rollouts.generate(PROMPTS, GREEDY)) == EXPECTED
    assert rollouts.captures


@pytest.mark.parametrize("error", [BrokenForwardError(), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_inside_a_replay(error):
    """Guards against rows of a broken call being found running by the next one, which uses the same steps."""
    model = model_in_training()
    rollouts = engine(model)
    trap = Trap(model.model.layers[1].mlp, 7, raising(error), hook=False)
    with left_as_found(model), pytest.raises(type(error)):
        rollouts.generate(PROMPTS, GREEDY)
    captures = rollouts.captures
    assert (trap.calls, captures) == (7, 1)
    with left_as_found(model):
        assert tokens(rollouts.generate(PROMPTS, GREEDY)) == EXPECTED
    assert (rollouts.recapture_reasons, rollouts.captures) == ([], 2)


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("route", ROUTES)
def test_an_error_inside_a_stream(route, at):
    """Guards against the rollout mode of a stream outliving the error that ended it."""
    model = model_in_training()
    rollouts = engine(model, route, capture=False)
    Trap(model.model.layers[1].mlp, at, raising(KeyboardInterrupt()))
    stream = rollouts.stream(PROMPTS, GREEDY)
    with left_as_found(model), pytest.raises(KeyboardInterrupt):
        list(stream)
    assert list(stream) == []
    assert tokens(rollouts.generate(PROMPTS, GREEDY)) == EXPECTED


@pytest.mark.parametrize("route", ROUTES)
def test_the_model_while_a_completion_is_held(route):
    """Guards against a training step between two completions running with the engine's attention or mode."""
    model = model_in_training()
    rollouts = engine(model, route)
    before = snapshot(model)
    seen = {}
    for completion in rollouts.stream(PROMPTS, GREEDY):
        assert snapshot(model) == before
        assert torch.is_grad_enabled()
        with pytest.raises(EngineStateError, match="stream"):
            rollouts.generate(PROMPTS, GREEDY)
        with pytest.raises(EngineStateError, match="stream"):
            rollouts.shutdown()
        assert snapshot(model) == before
        seen[completion.prompt_index] = list(completion.token_ids)
    assert [seen[index] for index in range(len(PROMPTS))] == EXPECTED
    assert snapshot(model) == before


@pytest.mark.thinned(3)
@pytest.mark.parametrize("drop", [lambda stream: stream.close(), lambda stream: None], ids=["closed", "collected"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_given_up(route, drop):
    """Guards against rows of an abandoned stream, or its claim on the engine, staying behind."""
    model = model_in_training()
    rollouts = engine(model, route)
    with left_as_found(model):
        stream = rollouts.stream(PROMPTS, GREEDY)
        next(stream)
        drop(stream)
        del stream
        gc.collect()
        assert tokens(rollouts.generate(PROMPTS, GREEDY)) == EXPECTED


def test_a_stream_never_begun_claims_nothing():
    """Guards against an engine that stays busy for a stream nobody reads."""
    model = model_in_training()
    rollouts = engine(model)
    stream = rollouts.stream(PROMPTS, GREEDY)
    with ForwardCounter(model) as forwards:
        assert tokens(rollouts.generate(PROMPTS, GREEDY)) == EXPECTED
        assert forwards.count
    stream.close()


def test_a_generate_inside_a_forward_is_refused():
    """Guards against a hook that rolls out in the middle of a rollout, over the same pages."""
    model = model_in_training()
    rollouts = engine(model, capture=False)
    Trap(model.model.layers[0], 3, lambda: rollouts.generate(PROMPTS, GREEDY))
    with left_as_found(model), pytest.raises(EngineStateError):
        rollouts.generate(PROMPTS, GREEDY)
    assert tokens(rollouts.generate(PROMPTS, GREEDY)) == EXPECTED


def test_an_interrupt_from_the_keyboard():
    """Guards against a real signal, which may arrive between any two steps, leaving the model changed."""
    script = """
        import os, signal, torch
        torch.set_num_threads(1)
        import test_manners as manners
        for route in manners.ROUTES:
            for at in (1, 2, 5):
                model = manners.model_in_training()
                rollouts = manners.engine(model, route)
                interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
                manners.Trap(model.model.layers[1].mlp, at, interrupt, hook=False)
                try:
                    with manners.left_as_found(model):
                        rollouts.generate(manners.PROMPTS, manners.GREEDY)
                except KeyboardInterrupt:
                    print("interrupted")
                assert manners.tokens(rollouts.generate(manners.PROMPTS, manners.GREEDY)) == manners.EXPECTED
    """
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["interrupted"] * 3 * len(ROUTES)


@pytest.mark.parametrize("route", ["packed", "equal_width", "per_prompt"])
@pytest.mark.parametrize("prefill_capture", ["auto", True])
def test_another_default_device(route, prefill_capture):
    """Guards against tensors made where the caller's default device is, and not where the model is."""
    model = zoo.build("mistral")
    prompts = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=5)
    sampling = SamplingConfig(
        n=2,
        max_new_tokens=6,
        min_new_tokens=2,
        stop_token_ids=(5,),
        temperature=1.0,
        top_k=9,
        top_p=0.9,
        repetition_penalty=1.2,
        presence_penalty=0.1,
        logit_bias={3: 1.0},
        seed=1,
        raw_logprobs=True,
        top_logprobs=2,
        kept_tokens=9,
    )
    config = RolloutConfig(max_slots=4, prefill_route=route, prefill_capture=prefill_capture)
    expected = RolloutEngine(model, config=config).generate(prompts, sampling).completions
    with torch.device("meta"):
        assert RolloutEngine(model, config=config).generate(prompts, sampling).completions == expected
