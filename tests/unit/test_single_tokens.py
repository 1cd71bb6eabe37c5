"""Biases and exclusions of single tokens: what a checkpoint and a request come to together, and what is refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import zoo
from texts import character_tokenizer

from liveroll import ConfigError, RolloutConfig, RolloutEngine, SamplingConfig, UnsupportedGenerationError
from liveroll.model.generate_arguments import generate_kwargs
from liveroll.model.generation import resolve_sampling

WIDTH, KNOWN = 4, zoo.VOCAB_SIZE


def resolve(own=(), **sampling):
    """The settings of a request to a model whose generation configuration has these."""
    model = zoo.build("llama")
    for name, value in dict(own).items():
        setattr(model.generation_config, name, value)
    ids = torch.ones(1, WIDTH, dtype=torch.int64)
    return resolve_sampling(
        model,
        SamplingConfig(max_new_tokens=3, **sampling),
        prompt_width=WIDTH,
        input_ids=ids,
        attention_mask=ids,
        vocab_size=zoo.VOCAB_SIZE,
    )


@pytest.mark.parametrize(
    "given", [[[[7], 1.5], [[2], -3.0]], {(7,): 1.5, (2,): -3.0}, [[[9], 8.0], [[7], 1.5], [[2], -3.0], [[9], 0]]]
)
def test_biases_in_every_form(given):
    """Guards against a form that transformers takes being refused, and the first of two biases winning."""
    expected = ((2, -3.0), (7, 1.5), (9, 0.0)) if len(given) > 2 else ((2, -3.0), (7, 1.5))
    assert resolve({"sequence_bias": given}).logit_bias == expected


def test_what_forbids_is_one_list():
    """Guards against bad words of one token, or an infinite bias, that are lost; a stop token is no bad word."""
    own = {
        "suppress_tokens": torch.tensor([5, 3]),
        "bad_words_ids": [[8], [6]],
        "sequence_bias": [[[4], -math.inf], [[5], 1.0]],
        "begin_suppress_tokens": [9, 6],
        "eos_token_id": 6,
    }
    found = resolve(own)
    assert found.forbidden_tokens == (3, 4, 5, 8)
    assert found.first_forbidden_tokens == (6, 9)
    assert found.logit_bias == ((5, 1.0),)


@pytest.mark.parametrize("given", [(), (2, 1)])
def test_a_request_wins_over_the_checkpoint(given):
    """Guards against a request that can add to what a checkpoint forbids or biases, and not take away."""
    own = {"suppress_tokens": [5], "bad_words_ids": [[8]], "sequence_bias": [[[4], 1.0]]}
    found = resolve(own, forbidden_tokens=given, logit_bias=[(token, 2.0) for token in given])
    assert found.forbidden_tokens == tuple(sorted(given))
    assert found.logit_bias == tuple((token, 2.0) for token in sorted(given))
    kwargs = generate_kwargs(SamplingConfig(forbidden_tokens=given, logit_bias=dict.fromkeys(given, 2.0)))
    assert kwargs["suppress_tokens"] == (list(given) or None)
    assert kwargs["bad_words_ids"] is None
    assert kwargs["sequence_bias"] == ({(token,): 2.0 for token in given} or None)


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        ({"bad_words_ids": [[3], [4, 5]]}, UnsupportedGenerationError, r"holds \[4, 5\]"),
        ({"sequence_bias": [[[4, 5], 1.0]]}, UnsupportedGenerationError, r"holds \[4, 5\]"),
        ({"bad_words_ids": [[]]}, UnsupportedGenerationError, r"holds \[\]"),
        ({"bad_words_ids": [[zoo.VOCAB_SIZE]]}, ConfigError, "bad_words_ids=.* 0 to 96"),
        ({"suppress_tokens": [-1]}, ConfigError, "suppress_tokens=.* 0 to 96"),
        ({"begin_suppress_tokens": ["a"]}, ConfigError, "begin_suppress_tokens=.* 0 to 96"),
        ({"sequence_bias": [[[3], math.nan]]}, ConfigError, "sequence_bias=.*NaN"),
        ({"sequence_bias": [[[3], math.inf]]}, ConfigError, "sequence_bias=.*inf"),
        ({"sequence_bias": [3]}, ConfigError, "sequence_bias=.*must map"),
    ],
)
def test_what_cannot_be_done_is_named(own, error, message):
    """Guards against several tokens taken for single ones, and ids that reach another token's score."""
    with pytest.raises(error, match=message):
        resolve(own)


@pytest.mark.parametrize("name", ["forbidden_tokens", "logit_bias"])
def test_tokens_that_do_not_exist(name):
    """Guards against an id outside the vocabulary being written behind a row."""
    value = {zoo.VOCAB_SIZE: 1.0} if name == "logit_bias" else (zoo.VOCAB_SIZE,)
    with pytest.raises(ConfigError, match=rf"SamplingConfig.{name} holds \[97\].* 0 to 96"):
        resolve(**{name: value})


@pytest.mark.parametrize(
    "settings",
    [
        {"forbidden_tokens": range(zoo.VOCAB_SIZE)},
        {"forbidden_tokens": range(1, zoo.VOCAB_SIZE), "stop_token_ids": (0,), "min_new_tokens": 1},
    ],
)
def test_nothing_left_to_sample(settings):
    """Guards against NaN, which would blame the model, where the settings leave no token."""
    engine = RolloutEngine(zoo.shared("llama"))
    with pytest.raises(ConfigError, match="all 97 tokens are forbidden"):
        engine.generate([[1, 2]], SamplingConfig(max_new_tokens=3, **settings))
    assert engine.memory().total == 0


def padded(**config):
    """An engine whose tokenizer knows fewer tokens than the model, all of them less likely; and the model."""
    model, tokenizer = zoo.build("llama", vocab_size=zoo.VOCAB_SIZE + 15), copy.deepcopy(character_tokenizer())
    with torch.no_grad():
        model.lm_head.weight[KNOWN:] *= 20
    return RolloutEngine(model, tokenizer, RolloutConfig(max_slots=2, **config)), model


@pytest.mark.parametrize("route", ["packed", "ordinary"])
@pytest.mark.parametrize("setting", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_ids_that_no_tokenizer_knows_are_not_sampled(route, setting):
    """Guards against responses that cannot be decoded, in every variant of the sampler."""
    prompts, sampling = zoo.ragged_prompts(zoo.VOCAB_SIZE, 0), SamplingConfig(max_new_tokens=8, seed=1, **setting)
    engine, _ = padded(prefill_route=route)
    assert max(max(c.token_ids) for c in engine.generate(prompts, sampling).completions) < KNOWN
    free, _ = padded(prefill_route=route, sample_padded_vocabulary=True)
    assert max(max(c.token_ids) for c in free.generate(prompts, sampling).completions) >= KNOWN


def test_a_fallback_does_not_sample_them_either():
    """Guards against `model.generate` taking an id that the engine would not."""
    engine, model = padded(fallback="generate")
    model.generation_config.no_repeat_ngram_size = 3
    batch = engine.generate(zoo.ragged_prompts(zoo.VOCAB_SIZE, 0), SamplingConfig(max_new_tokens=8))
    assert batch.stats.route == "generate"
    assert max(max(completion.token_ids) for completion in batch.completions) < KNOWN


def test_stops_that_no_tokenizer_knows():
    """Guards against a stop token that can never come; one of the model's own configuration may be sampled."""
    engine, model = padded()
    with pytest.raises(ConfigError, match=rf"stop_token_ids holds \[{KNOWN}\].*sample_padded_vocabulary"):
        engine.generate([[1, 2]], SamplingConfig(max_new_tokens=3, stop_token_ids=(3, KNOWN)))
    model.generation_config.eos_token_id = KNOWN
    assert engine.generate([[1, 2]], SamplingConfig(max_new_tokens=9)).completions[0].token_ids[-1] == KNOWN


def test_a_tokenizer_that_grows():
    """Guards against a bound that stays where it was when tokens were added, also in what is captured."""
    engine, _ = padded()
    greedy = SamplingConfig(max_new_tokens=3)
    assert max(engine.generate([[1, 2]], greedy).completions[0].token_ids) < KNOWN
    engine.tokenizer.add_tokens(["<more>"])
    assert max(engine.generate([[1, 2]], greedy).completions[0].token_ids) == KNOWN
    assert engine.recapture_reasons == [f"ids that may be sampled changed from {KNOWN} to {KNOWN + 1}"]


@pytest.mark.parametrize("setting", ["presence_penalty", "frequency_penalty"])
def test_penalties_that_generate_does_not_know(setting):
    """Guards against a fallback that drops a penalty in silence."""
    model = zoo.build("llama")
    model.generation_config.no_repeat_ngram_size = 3
    engine = RolloutEngine(model, config=RolloutConfig(fallback="generate"))
    with pytest.raises(ConfigError, match="presence or frequency penalty"):
        engine.generate([[1, 2]], SamplingConfig(max_new_tokens=3, **{setting: 0.5}))
