"""Ctrl-C at moments in which it has done harm: the model is as found, and the engine goes on."""

from __future__ import annotations

import contextlib
import gc
import sys

import pytest
import zoo
from snapshots import left_as_found

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig
from liveroll.decode import inputs
from liveroll.planning.geometry import ModelGeometry

PROMPTS = [[1, 2, 3], [4]]
GREEDY = SamplingConfig(max_new_tokens=3)


class Interrupt:
    """Raises KeyboardInterrupt where a function is entered for the k-th time, which is where Python looks for it.

    Args:
        function: the function.
        at: k, from 1.
    """

    def __init__(self, function, at):
        self._code = function.__code__
        self._left = at

    def _enter(self, frame, event, argument):
        if frame.f_code is self._code and is_of_the_package(frame.f_locals["self"]):
            self._left -= 1
            if not self._left:
                sys.settrace(None)
                raise KeyboardInterrupt

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)


def is_of_the_package(owner):
    """Whether it is a context of the package, or anything but a context: torch's own do not bear an interrupt."""
    return not hasattr(owner, "gen") or "/liveroll/" in owner.gen.gi_code.co_filename


FUNCTIONS = {
    "what is counted of the model": ModelGeometry.__post_init__,
    "the end of a context": contextlib._GeneratorContextManager.__exit__,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_interrupt_at_every_entry(name):
    """Guards against a model whose shape is half known, and our attention put back after the rollout has ended."""
    model = zoo.build("llama").train()
    config = RolloutConfig(prefill_route="equal_width", max_slots=2, fuse="auto")
    expected = RolloutEngine(model, config=config).generate(PROMPTS, GREEDY).completions
    interrupted, at = True, 0
    while interrupted:
        at, interrupted = at + 1, False
        engine = RolloutEngine(model, config=config)
        with left_as_found(model):
            try:
                with Interrupt(FUNCTIONS[name], at):
                    engine.generate(PROMPTS, GREEDY)
            except KeyboardInterrupt:
                interrupted = True
            gc.collect()
        assert engine.generate(PROMPTS, GREEDY).completions == expected
    assert at > 1


@pytest.mark.timeout(60)  # with rows of before, no row would ever end
def test_an_interrupt_while_the_rows_of_a_step_are_uploaded(monkeypatch):
    """Guards against a step that goes on with rows of the call before: it is told that they are on the device already.

    Rows end one by one, so that the steps of a call have different ones.
    """
    model = zoo.build("llama")
    prompts, budgets = zoo.ragged_prompts(zoo.VOCAB_SIZE, 0, [3, 2, 1, 3]), (4, 6, 3, 6)
    sampling = [SamplingConfig(max_new_tokens=budget) for budget in budgets]
    engine = RolloutEngine(model, config=RolloutConfig(max_slots=4))
    expected = engine.generate(prompts, sampling).completions
    upload, left = inputs.upload_into, [0]

    def upload_and_stop(array, target):
        upload(array, target)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(inputs, "upload_into", upload_and_stop)
    for at in (1, 2, 3):
        left[0] = at
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts, sampling)
        assert engine.generate(prompts, sampling).completions == expected
