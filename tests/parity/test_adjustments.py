"""Biases, exclusions and penalties, as `model.generate` has them and as they are written out, on every way."""

from __future__ import annotations

from functools import cache

import pytest
from plain_sampler import plain_greedy
from zoo import ARCHITECTURES, VOCAB_SIZE, build, early_eos, ragged_prompts, reference, shared

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig

ROUTES = ("packed", "equal_width", "per_prompt", "ordinary")
BUDGET = 14
PROMPTS = ragged_prompts(VOCAB_SIZE, seed=31)

each_route = pytest.mark.parametrize("route", ROUTES)


def engine(model, **settings):
    return RolloutEngine(model, config=RolloutConfig(**{"page_size": 4, "max_slots": 2, **settings}))


def tokens(batch):
    return [list(completion.token_ids) for completion in batch.completions]


@cache
def likely(name):
    """The tokens of the free responses: what is worth forbidding or biasing."""
    rows = [reference(shared(name), prompt, max_new_tokens=BUDGET) for prompt in PROMPTS]
    return sorted({token for row in rows for token in row}), [row[0] for row in rows]


def asked(name):
    """Settings of `generate` that change most responses."""
    common, first = likely(name)
    return {
        "sequence_bias": {(common[0],): -4.0, (common[1],): 3.5, (96,): 2.5},
        "suppress_tokens": common[2:5],
        "bad_words_ids": [[common[5]], [common[6]]],
        "begin_suppress_tokens": first[:3],
        "repetition_penalty": 1.2,
        "min_new_tokens": 3,
    }


@cache
def answers(name):
    model = shared(name)
    stop = early_eos(model, PROMPTS, BUDGET)
    ends = {"eos_token_id": [stop], "pad_token_id": 0}
    return stop, [reference(model, prompt, max_new_tokens=BUDGET, **asked(name), **ends) for prompt in PROMPTS]


@each_route
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_a_checkpoint_asks_for(name, route):
    """Guards against a bias or an exclusion that another row sees, that is lost on a route, or comes out of order."""
    stop, expected = answers(name)
    model = build(name)
    for field, value in asked(name).items():
        setattr(model.generation_config, field, value)
    batch = engine(model, prefill_route=route).generate(
        PROMPTS, SamplingConfig(max_new_tokens=BUDGET, stop_token_ids=(stop,))
    )
    assert tokens(batch) == expected
    free = engine(model, prefill_route=route).generate(
        PROMPTS, SamplingConfig(max_new_tokens=BUDGET, stop_token_ids=(), logit_bias={}, forbidden_tokens=())
    )
    kept = {"begin_suppress_tokens": asked(name)["begin_suppress_tokens"], "repetition_penalty": 1.2}
    assert tokens(free) == [reference(shared(name), prompt, max_new_tokens=BUDGET, **kept) for prompt in PROMPTS]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_a_request_asks_for(name):
    """Guards against the same, asked for by the request, in any architecture; refills reuse every slot."""
    wanted = asked(name)
    sampling = SamplingConfig(
        max_new_tokens=BUDGET,
        logit_bias={token: bias for (token,), bias in wanted["sequence_bias"].items()},
        forbidden_tokens=[*wanted["suppress_tokens"], *(word for (word,) in wanted["bad_words_ids"])],
        repetition_penalty=1.2,
    )
    given = {name: wanted[name] for name in ("sequence_bias", "suppress_tokens", "bad_words_ids", "repetition_penalty")}
    expected = [reference(shared(name), prompt, max_new_tokens=BUDGET, **given) for prompt in PROMPTS]
    assert tokens(engine(shared(name)).generate(PROMPTS, sampling)) == expected


# Counts decide soon: a greedy row repeats itself, and no row may see another's.
COUNTED = [
    SamplingConfig(max_new_tokens=BUDGET, presence_penalty=1.5),
    SamplingConfig(max_new_tokens=BUDGET, frequency_penalty=0.8),
    SamplingConfig(max_new_tokens=BUDGET),
    SamplingConfig(max_new_tokens=BUDGET, presence_penalty=-1.0, repetition_penalty=1.3),
    SamplingConfig(max_new_tokens=BUDGET, frequency_penalty=-0.5, presence_penalty=3.0, logit_bias={7: 2.0}),
]


@cache
def counted(name):
    batch = engine(shared(name), capture=False).generate(PROMPTS, COUNTED)
    return [
        plain_greedy(shared(name), prompt, sampling) for prompt, sampling in zip(PROMPTS, batch.sampling, strict=True)
    ]


@pytest.mark.parametrize(
    "config",
    [
        *({"prefill_route": route} for route in ROUTES),
        {"max_slots": 1, "run_ahead": 3},
        {"max_slots": 8, "kv_tokens": 52, "run_ahead": 2},
        {"max_slots": 8, "kv_tokens": 52, "prefill_route": "equal_width"},
        {"max_slots": 8, "capture": False},
    ],
    ids=str,
)
def test_counts_of_the_response(config):
    """Guards against counts of the prompt, of a frozen or another row, and counts lost by preemption or a refill."""
    rollouts = engine(shared("llama"), **config)
    for _ in range(2):
        batch = rollouts.generate(PROMPTS, COUNTED)
        assert "kv_tokens" not in config or batch.stats.preemptions > 0
        assert tokens(batch) == counted("llama")
    free = [reference(shared("llama"), prompt, max_new_tokens=BUDGET) for prompt in PROMPTS]
    changed = [ours != theirs for ours, theirs in zip(counted("llama"), free, strict=True)]
    assert changed == [True, True, False, True, True]
