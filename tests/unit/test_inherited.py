"""A generation configuration that holds something else than it should."""

from __future__ import annotations

import pytest
import torch
import zoo
from snapshots import ForwardCounter
from transformers import GenerationConfig

from liveroll import ConfigError, RolloutEngine, SamplingConfig
from liveroll.model.inherited import read_ids

MODEL = zoo.build("llama")

WRONG = {
    "max_new_tokens": ["8", 2.5, True],
    "min_new_tokens": ["1", 2.5],
    "max_length": ["20", 20.5],
    "min_length": ["1", True],
    "temperature": ["1", True],
    "top_k": ["5", 2.5, True],
    "top_p": ["1", [0.9]],
    "min_p": ["x"],
    "repetition_penalty": ["1.1", True],
    "eos_token_id": ["x", 2.5, True, [1, "a"], [[1]]],
    "pad_token_id": ["x", 2.5, True, [3]],
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
    "bad_words_ids": [5, "word"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_what_is_no_number_and_no_token(name, value, monkeypatch):
    """Guards against a checkpoint's mistake that ends in an error which does not say where it stands."""
    monkeypatch.setattr(MODEL, "generation_config", GenerationConfig())
    setattr(MODEL.generation_config, name, value)
    with ForwardCounter(MODEL) as forwards, pytest.raises(ConfigError, match=f"generation_config.{name} must be "):
        RolloutEngine(MODEL).generate([[1, 2]], SamplingConfig(seed=1))
    assert forwards.count == 0


def test_no_configuration(monkeypatch):
    """Guards against an error that speaks of an attribute of None."""
    monkeypatch.setattr(MODEL, "generation_config", None)
    with pytest.raises(ConfigError, match="generation_config is None; set it"):
        RolloutEngine(MODEL).generate([[1, 2]])


@pytest.mark.parametrize("nothing", [[], (), None])
def test_a_list_of_no_ends(nothing, monkeypatch):
    """Guards against an empty list of ends whose first entry pads."""
    expected = RolloutEngine(MODEL).generate([[1, 2]], SamplingConfig(max_new_tokens=4)).completions
    monkeypatch.setattr(MODEL, "generation_config", GenerationConfig())
    MODEL.generation_config.eos_token_id = nothing
    assert RolloutEngine(MODEL).generate([[1, 2]], SamplingConfig(max_new_tokens=4)).completions == expected


@pytest.mark.parametrize(
    ("value", "ids"),
    [(None, ()), (3, (3,)), ([3, 4], (3, 4)), (torch.tensor(3), (3,)), (torch.tensor([3, 4]), (3, 4)), ("x", ("x",))],
)
def test_ids_in_every_form(value, ids):
    """Guards against a tensor of no dimension that is taken for a list."""
    assert read_ids(value) == ids
