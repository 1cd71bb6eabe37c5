"""Bad settings are refused when they are made, by an error that names the field."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest

from liveroll import ConfigError, LiverollError, RolloutConfig, SamplingConfig

NAN, INF = float("nan"), float("inf")
NOT_WHOLE = [1.5, "3", True, NAN, INF, [1], np.float64(2.0)]
NOT_NUMBERS = ["0.5", True, [0.5], NAN, INF, -INF]

BAD_ROLLOUT = {
    "max_slots": [0, -1, 10**12, None, *NOT_WHOLE],
    "max_length": [0, 1, -5, 10**12, *NOT_WHOLE],
    "kv_tokens": [0, -1, *NOT_WHOLE],
    "kv_bytes": [0, -1, *NOT_WHOLE],
    "kv_fraction": [0, 0.0, -0.1, 1.1, *NOT_NUMBERS],
    "page_size": [0, -16, None, *NOT_WHOLE],
    "prefill_route": ["pakced", "", None, 1, "generate"],
    "auto_routes": [None, (), [], "packed", ("packd",), ("auto",), ("packed", "packed"), ("ordinary",), (1,), [["a"]]],
    "costs": [0, 1.5, True, "", b"costs.json", {"fixed_ms": 1.0}, [1.0]],
    "prefill_capture": [0, "yes", None],
    "prefill_capture_tokens": [0, -1, 10**12, None, *NOT_WHOLE],
    "prefill_max_tokens": [0, -1, *NOT_WHOLE],
    "fallback": ["", None, True, "never"],
    "training_mode": [0, 1, "eval"],
    "capture": [0, "yes", None],
    "compile": [0, "yes", None],
    "fuse": [0, 1, "yes", None],
    "cascade": [0, 1, "yes", None],
    "gather_weights": [0, 1, "yes", None],
    "balance": ["", None, 1, "even"],
    "rank_timeout": [0, 0.0, -1.0, *NOT_NUMBERS],
    "max_captures": [0, -1, *NOT_WHOLE],
    "run_ahead": [-1, *NOT_WHOLE],
    "seed": [-1, None, *NOT_WHOLE],
    "sample_padded_vocabulary": [0, 1, None, "yes"],
    "progress": [0, 1, None, "yes"],
    "profile": [0, 1, None, "yes"],
}
BAD_SAMPLING = {
    "max_new_tokens": [0, -1, *NOT_WHOLE],
    "min_new_tokens": [-1, *NOT_WHOLE],
    "n": [0, -1, 10**12, None, *NOT_WHOLE],
    "temperature": [-0.1, 1e-7, 1e-310, *NOT_NUMBERS],
    "top_k": [-1, *NOT_WHOLE],
    "top_p": [0, 0.0, -0.1, 1.01, *NOT_NUMBERS],
    "min_p": [-0.1, 1.01, *NOT_NUMBERS],
    "repetition_penalty": [0, 0.0, -1.0, 1e-7, 1e300, *NOT_NUMBERS],
    "presence_penalty": [None, 1e7, -1e7, *NOT_NUMBERS],
    "frequency_penalty": [None, 1e7, -1e7, *NOT_NUMBERS],
    "logit_bias": [5, [5], "ab", {-1: 1.0}, {"a": 1.0}, {"-1": 1.0}, {True: 1.0}, {1.5: 1.0}, {None: 1.0}]
    + [{5: value} for value in (None, 1e7, -1e7, *NOT_NUMBERS)],
    "forbidden_tokens": [5, "5", [-1], [1.5], [True], ["a"], [None]],
    "stop_token_ids": [5, "5", [-1], [1.5], [True], ["a"], [None]],
    "stop": [5, [5], [""], "", [None], ["a", b"b"]],
    "seed": [-1, *NOT_WHOLE],
    "include_stop": [0, 1, None, "yes"],
    "logprobs": [0, 1, None, "yes"],
    "raw_logprobs": [0, 1, None, "yes"],
    "top_logprobs": [-1, 33, None, *NOT_WHOLE],
    "kept_tokens": [-1, 4097, None, *NOT_WHOLE],
}


def cases(bad):
    return [pytest.param(name, value, id=f"{name}={value!r}") for name, values in bad.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(BAD_ROLLOUT))
def test_rollout_config(name, value):
    """Guards against an engine that begins with a setting it cannot keep to."""
    with pytest.raises(ConfigError, match=name):
        RolloutConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), cases(BAD_SAMPLING))
def test_sampling_config(name, value):
    """Guards against NaN, infinity, a flag or a string taken for a number."""
    with pytest.raises(ConfigError, match=name):
        SamplingConfig(**{name: value})


@pytest.mark.parametrize("cls", [RolloutConfig, SamplingConfig])
def test_every_field_is_tried(cls):
    """Guards against a new field that this file forgets, or that nothing checks."""
    tried = BAD_ROLLOUT if cls is RolloutConfig else BAD_SAMPLING
    assert set(tried) == {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize(
    ("pair"), [("kv_tokens", "kv_bytes"), ("kv_bytes", "kv_fraction"), ("kv_tokens", "kv_fraction")]
)
def test_two_sizes_of_the_kv_memory(pair):
    """Guards against one of two contradicting sizes being dropped."""
    with pytest.raises(ConfigError, match=f"{pair[0]} and {pair[1]} all set the KV memory"):
        RolloutConfig(**{pair[0]: 64, pair[1]: 0.5 if pair[1] == "kv_fraction" else 64})


def test_routes_for_auto_without_auto():
    """Guards against a choice of routes that is dropped, since another route is taken."""
    with pytest.raises(ConfigError, match="auto_routes is what prefill_route='auto' may take"):
        RolloutConfig(auto_routes=("packed", "bucketed"))
    assert RolloutConfig(prefill_route="auto", auto_routes=["bucketed", "ordinary"]).auto_routes == (
        "bucketed",
        "ordinary",
    )


def test_a_path_of_costs_may_be_a_string():
    """Guards against one configuration that is two, and a path that nothing is read from."""
    assert RolloutConfig(costs="costs.json") == RolloutConfig(costs=Path("costs.json"))


def test_contradicting_lengths():
    """Guards against a least length that the budget never reaches."""
    with pytest.raises(ConfigError, match="min_new_tokens=5 is more than max_new_tokens=4"):
        SamplingConfig(max_new_tokens=4, min_new_tokens=5)


@pytest.mark.parametrize(
    ("cls", "name", "hint"),
    [
        (SamplingConfig, "temprature", "SamplingConfig has no option temprature; did you mean temperature?"),
        (SamplingConfig, "num_return_sequences", "its options are max_new_tokens, .*logprobs"),
        (RolloutConfig, "max_slot", "RolloutConfig has no option max_slot; did you mean max_slots?"),
        (RolloutConfig, "dtype", "its options are max_slots, .*progress"),
    ],
)
def test_an_unknown_option_is_answered_with_the_known_ones(cls, name, hint):
    """Guards against a misspelt option that is lost, or refused without a word on what is right."""
    with pytest.raises(ConfigError, match=hint):
        cls(**{name: 1})


def test_positional_options_are_refused():
    """Guards against an option taken for its neighbour."""
    with pytest.raises(TypeError, match="positional"):
        RolloutConfig(8)


def test_numpy_numbers_are_numbers():
    """Guards against lengths taken from an array being refused, or staying in the settings as they are."""
    sampling = SamplingConfig(
        max_new_tokens=np.int64(3),
        temperature=np.float32(0.5),
        top_p=np.float64(0.9),
        stop_token_ids=np.array([1, 2]),
        logit_bias={np.int64(4): np.float32(0.5)},
        seed=np.uint8(7),
    )
    given = {"max_new_tokens": 3, "temperature": 0.5, "top_p": 0.9, "stop_token_ids": (1, 2), "seed": 7}
    plain = SamplingConfig(**given, logit_bias={4: 0.5})
    assert sampling == plain
    assert repr(sampling) == repr(plain)


def test_numbers_are_one_however_they_are_written():
    """Guards against ranks that are refused, since one was given a temperature of 1 and another one of 1.0."""
    whole = SamplingConfig(temperature=1, top_p=1, presence_penalty=0), RolloutConfig(rank_timeout=60)
    real = SamplingConfig(temperature=1.0, top_p=1.0, presence_penalty=0.0), RolloutConfig(rank_timeout=60.0)
    assert repr(whole) == repr(real)


def test_configurations_are_values():
    """Guards against settings that cannot be copied, compared, hashed or sent to another process."""
    for config in (RolloutConfig(max_slots=3), SamplingConfig(n=2, stop="a", logit_bias={3: 1})):
        for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
            assert twin == config
            assert hash(twin) == hash(config)
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.seed = 1


@pytest.mark.parametrize("given", [{7: 1, 2: -0.5}, {"7": 1, "2": -0.5}, [(7, 1), (2, -0.5)], ((2, -0.5), (7, 1.0))])
def test_biases_are_pairs_by_ascending_id(given):
    """Guards against equal biases that differ as settings, and ids that JSON has made strings."""
    assert SamplingConfig(logit_bias=given).logit_bias == ((2, -0.5), (7, 1.0))
    assert SamplingConfig(logit_bias={}).logit_bias == ()


def test_every_error_is_of_the_package_and_of_its_kind():
    """Guards against a caller who catches LiverollError, or ValueError, missing one."""
    with pytest.raises(LiverollError):
        SamplingConfig(n=0)
    with pytest.raises(ValueError, match="n must"):
        SamplingConfig(n=0)
