"""Greedy tokens of every route equal `model.generate`, on each prompt alone and on the left-padded batch, in fp32."""

from __future__ import annotations

from functools import cache

import pytest
from zoo import (
    ARCHITECTURES,
    VOCAB_SIZE,
    early_eos,
    left_pad,
    ragged_prompts,
    reference,
    reference_batch,
    shared,
    with_eos,
)

from liveroll import CostModel, RolloutConfig, RolloutEngine, RolloutRequest, SamplingConfig

ROUTES = ("packed", "equal_width", "per_prompt", "ordinary")
PLANNED = ("bucketed", "auto")
BUDGET = 24
PROMPTS = ragged_prompts(VOCAB_SIZE, seed=11)
# With these the five prompts take several buckets; auto takes ordinary where all of them fit, and of two slots it
# takes bucketed for the short prompts and packed for the long ones.
COSTS = CostModel(fixed_ms=0.5, packed_fixed_ms=1.5, packed_token_ms=0.05)

every_case = pytest.mark.parametrize(
    ("name", "route"),
    [(name, route) for name in ARCHITECTURES for route in ROUTES]
    + [(name, route) for name in ("llama", "mistral", "gemma2", "gpt2") for route in PLANNED],
)


@cache
def alone(name, **kwargs):
    return [reference(shared(name), prompt, max_new_tokens=BUDGET, **kwargs) for prompt in PROMPTS]


@cache
def stop_of(name):
    return early_eos(shared(name), PROMPTS, BUDGET)


def tokens(batch):
    return [list(completion.token_ids) for completion in batch.completions]


def engine(name, route, **settings):
    costs = COSTS if route in PLANNED else None
    config = RolloutConfig(prefill_route=route, costs=costs, page_size=4, **settings)
    return RolloutEngine(shared(name), config=config)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("route", ROUTES + PLANNED)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ragged_prompts(name, route):
    """Guards against wrong positions, masks and windows: prompts of 1 to 20 tokens, windows of 8."""
    batch = engine(name, route).generate(PROMPTS, SamplingConfig(max_new_tokens=BUDGET))
    assert tokens(batch) == alone(name)
    assert {completion.finish_reason for completion in batch.completions} == {"length"}


@pytest.mark.thinned(4)
@every_case
def test_left_padded_request(name, route):
    """Guards against padding that is attended to, or that shifts positions."""
    model = shared(name)
    with with_eos(model, None, pad=0):
        ids, mask = left_pad(PROMPTS, pad_id=0)
        batch = engine(name, route).generate(RolloutRequest(ids, mask), SamplingConfig(max_new_tokens=BUDGET))
        assert tokens(batch) == reference_batch(model, PROMPTS, max_new_tokens=BUDGET)
    assert batch.input_ids[:, : ids.shape[1]].equal(ids)
    assert batch.response_start_idx == ids.shape[1]


@pytest.mark.thinned(4)
@every_case
def test_early_eos_and_refill(name, route):
    """Guards against a refilled slot that keeps keys, lengths or stops of the row before it: 5 prompts, 2 slots."""
    model, stop = shared(name), stop_of(name)
    with with_eos(model, stop):
        batch = engine(name, route, max_slots=2).generate(PROMPTS, SamplingConfig(max_new_tokens=BUDGET))
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in alone(name)]
    assert tokens(batch) == expected
    for completion in batch.completions:
        stopped = completion.token_ids[-1] == stop
        assert (completion.finish_reason, completion.stop) == (("stop", stop) if stopped else ("length", None))


@pytest.mark.thinned(4)
@every_case
def test_pad_equal_to_eos_and_several_eos(name, route):
    """Guards against a PAD taken for the end, or an end taken for PAD, where they are one token."""
    model, stop = shared(name), stop_of(name)
    others = sorted({row[len(row) // 2] for row in alone(name)} - {stop})[:2]
    with with_eos(model, [stop, *others], pad=stop):
        batch = engine(name, route).generate(PROMPTS, SamplingConfig(max_new_tokens=BUDGET))
        expected = [reference(model, prompt, max_new_tokens=BUDGET) for prompt in PROMPTS]
    assert tokens(batch) == expected
    widths = [int(row.sum()) for row in batch.attention_mask[:, batch.response_start_idx :]]
    assert widths == [len(row) for row in expected]


@pytest.mark.thinned(4)
@every_case
def test_repetition_penalty(name, route):
    """Guards against a penalty that forgets the prompt, misses the first token, or outlives its row's slot."""
    batch = engine(name, route, max_slots=2).generate(
        PROMPTS, SamplingConfig(max_new_tokens=BUDGET, repetition_penalty=1.3)
    )
    assert tokens(batch) == alone(name, repetition_penalty=1.3)


@pytest.mark.thinned(4)
@every_case
def test_penalty_over_padded_history(name, route):
    """Guards against a history other than `generate`'s, which before 5.23 holds the padding too."""
    model = shared(name)
    with with_eos(model, None, pad=7):
        batch = engine(name, route).generate(
            RolloutRequest(*left_pad(PROMPTS, pad_id=7)), SamplingConfig(max_new_tokens=BUDGET, repetition_penalty=1.3)
        )
        assert tokens(batch) == reference_batch(model, PROMPTS, max_new_tokens=BUDGET, repetition_penalty=1.3)


def test_auto_takes_different_routes():
    """Guards against these tests following one route under several names."""

    def routes(route, **settings):
        return engine("llama", route, **settings).generate(PROMPTS, SamplingConfig(max_new_tokens=4)).stats

    assert routes("bucketed").prefill_routes == {"bucketed": 4}
    assert routes("auto").prefill_routes == {"ordinary": 1}
    mixed = routes("auto", max_slots=2)
    assert mixed.route == "bucketed"
    assert mixed.prefill_routes.keys() == {"bucketed", "packed"}
    assert sum(mixed.prefill_routes.values()) == mixed.prefill_forwards
