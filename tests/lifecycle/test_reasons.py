"""What is told of steps that are captured again."""

from __future__ import annotations

import copy
import logging

import zoo
from rollouts import check, engine_of, prompts
from snapshots import Trap, raising


def test_a_layer_of_the_same_tensors():
    """Guards against a step that goes on as a layer was when it was captured, where no tensor tells."""
    model = zoo.build("llama")
    engine = engine_of(model)
    check(engine, model, prompts(8))
    layer = model.model.layers[1]
    layer.self_attn = copy.copy(layer.self_attn)
    layer.self_attn.scaling *= 3
    check(engine, model, prompts(8))
    assert engine.captures == 2
    (reason,) = engine.recapture_reasons
    assert reason.startswith("layers changed from ")


def test_only_captures_that_replace_others_are_logged(caplog):
    """Guards against a message that alarms where nothing changed, and against silence where something did."""
    model = zoo.build("llama")
    engine = engine_of(model)
    with caplog.at_level(logging.INFO, "liveroll"):
        check(engine, model, prompts(8))
        engine.shutdown()
        check(engine, model, prompts(8))
        assert caplog.messages == []
        model.lm_head.weight.data = model.lm_head.weight.data.clone()
        check(engine, model, prompts(8))
    assert caplog.messages == [f"capturing again: {engine.recapture_reasons[0]}"]


def test_a_capture_that_fails_while_another_error_is_handled():
    """Guards against the caller's own trouble told as the reason."""
    model = zoo.build("llama")
    engine = engine_of(model)
    Trap(model.model.layers[1].mlp, 3, raising(RuntimeError("no room for numbers")), hook=False)
    try:
        raise ValueError("the disk is full")
    except ValueError:
        batch = check(engine, model, prompts(8))
    told = "because of model.layers.1.mlp (LlamaMLP): no room for numbers"
    assert batch.stats.eager_reason == f"the decode step cannot be captured, {told}"
