"""Rows in slots and pages that others had, with steps for those still in flight."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import zoo
from rollouts import check, engine_of, prompts, tokens
from texts import character_tokenizer

from liveroll import LogitsError, RolloutConfig, RolloutEngine, SamplingConfig

BUDGET = 20
ROWS = zoo.ragged_prompts(zoo.VOCAB_SIZE, 0, (1, 3, 7, 12, 20, 5, 30, 2, 9, 14, 4))

MODEL = zoo.shared("llama")


@cache
def whole():
    return [zoo.reference(MODEL, row, max_new_tokens=BUDGET) for row in ROWS]


def stopped(row, text):
    """A response up to the token that completes a string."""
    decode = character_tokenizer().decode
    return next((row[:end] for end in range(1, len(row) + 1) if text in decode(row[:end])), row)


@pytest.mark.parametrize("pages", [None, 16])
@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_rows_that_only_the_host_knows_to_have_ended(run_ahead, pages):
    """Guards against tokens of a row that ended by a string, which the device goes on with, in the row after it."""
    tokenizer = character_tokenizer()
    # Every other row ends by a string, each after another number of tokens.
    texts = [tokenizer.decode(row[3 + place : 5 + place]) for place, row in enumerate(whole())]
    stops = [(text,) if place % 2 else () for place, text in enumerate(texts)]
    settings = [SamplingConfig(max_new_tokens=BUDGET, stop=stop) for stop in stops]
    expected = [stopped(row, *stop) if stop else row for row, stop in zip(whole(), stops, strict=True)]
    assert len({len(row) for row in expected}) > 4
    config = RolloutConfig(max_slots=4, run_ahead=run_ahead, page_size=4, kv_tokens=pages and pages * 4)
    engine = RolloutEngine(MODEL, tokenizer, config)
    for _ in range(2):
        batch = engine.generate(ROWS, settings)
        assert tokens(batch) == expected
        assert bool(batch.stats.preemptions) == (pages is not None)


def test_the_filler_of_a_step_stays_where_it_is():
    """Guards against a filler that is moved on like a row, step after step, until it stands behind its pages."""
    engine = engine_of(MODEL, max_length=16, page_size=4)
    for _ in range(3):
        check(engine, MODEL, prompts(8, rows=3), 8)
    assert engine.replays == 3 * 7 > 16


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_refills_with_padding(run_ahead):
    """Guards against padding that is stored in a running row's pages, attended to, or counted in positions."""
    eos = zoo.early_eos(MODEL, ROWS, BUDGET)
    engine = engine_of(MODEL, prefill_route="equal_width", page_size=4, run_ahead=run_ahead)
    for rows in (ROWS, ROWS[::-1]):
        stats = check(engine, MODEL, rows, BUDGET, stop_token_ids=(eos,)).stats
        assert stats.prefill_forwards > 2
        assert stats.padded_tokens > 0


def test_keys_that_were_not_numbers():
    """Guards against NaN that a diverged model left in pages: a masked key's weight is 0, and 0 times NaN is NaN."""
    model = zoo.build("llama")
    engine = engine_of(model)
    good = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    with pytest.raises(LogitsError):
        engine.generate(prompts(30), SamplingConfig(max_new_tokens=2))
    model.load_state_dict(good)
    # Rows shorter than those before them in their pages.
    check(engine, model, prompts(3))
