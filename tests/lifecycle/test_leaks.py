"""Nothing of an earlier call, or of the row before in a slot, reaches a later row."""

from __future__ import annotations

import gc

import pytest
import zoo
from rollouts import check, engine_of, prompts, tokens

from liveroll import RolloutEngine, SamplingConfig
from liveroll.prefill.logits import PromptLogits
from liveroll.scheduling.pages import PageAllocator

LONG = 24


@pytest.fixture
def model():
    return zoo.build("llama")


def alone(model, row, sampling):
    """What a row comes to in an engine that has never run another, and captures nothing."""
    return tokens(engine_of(model, max_slots=1, capture=False).generate([row], sampling))[0]


def test_shorter_rows_after_longer_ones(model):
    """Guards against lengths, positions or keys of the longer rows that were in the slots before."""
    engine = engine_of(model)
    for width, budget in ((60, 20), (3, 4), (33, 9), (1, 12)):
        check(engine, model, prompts(width), budget)
    check(engine, model, zoo.ragged_prompts(zoo.VOCAB_SIZE, 1, (70, 1, 20, 5)), 8)
    check(engine, model, zoo.ragged_prompts(zoo.VOCAB_SIZE, 2, (1, 50, 2, 40)), 8)
    assert engine.captures == 1


def test_fewer_rows_after_more(model):
    """Guards against rows of the call before that still stand in the step's input."""
    engine = engine_of(model, max_slots=8)
    for rows in (8, 5, 8, 6):
        check(engine, model, prompts(9, rows=rows, seed=rows))
    assert engine.captures == 1


# Settings that leave something in a slot, each next to one that must not find it.
_SETTINGS = [
    SamplingConfig(max_new_tokens=8, repetition_penalty=2.5),
    SamplingConfig(max_new_tokens=8, repetition_penalty=1.5),
    SamplingConfig(max_new_tokens=8),
    SamplingConfig(max_new_tokens=8, temperature=2.0, top_k=2, seed=1),
    SamplingConfig(max_new_tokens=8, temperature=2.0, top_k=0, seed=2),
    SamplingConfig(max_new_tokens=8, temperature=3.0, top_k=0, top_p=0.4, seed=3),
    SamplingConfig(max_new_tokens=8, temperature=3.0, top_k=0, seed=4),
    SamplingConfig(max_new_tokens=8, temperature=3.0, top_k=0, min_p=0.5, seed=5),
    SamplingConfig(max_new_tokens=8, temperature=3.0, top_k=0, seed=6),
    SamplingConfig(max_new_tokens=2, temperature=0.3, top_k=0, seed=6),
    SamplingConfig(max_new_tokens=8, temperature=1.0, top_k=0, seed=7),
    SamplingConfig(max_new_tokens=8, min_new_tokens=6, stop_token_ids=tuple(range(0, 97, 2))),
    SamplingConfig(max_new_tokens=8, stop_token_ids=tuple(range(1, 97, 2))),
    SamplingConfig(max_new_tokens=8, stop_token_ids=(96,)),
    SamplingConfig(max_new_tokens=8, repetition_penalty=2.5, stop_token_ids=()),
    SamplingConfig(max_new_tokens=8, frequency_penalty=3.0),
    SamplingConfig(max_new_tokens=8, presence_penalty=4.0, temperature=1.0, top_k=0, seed=8),
    SamplingConfig(max_new_tokens=8, presence_penalty=-4.0),
    SamplingConfig(max_new_tokens=8, logit_bias=dict.fromkeys(range(0, 97, 3), 6.0)),
    SamplingConfig(max_new_tokens=8, forbidden_tokens=tuple(range(0, 97, 2))),
    SamplingConfig(max_new_tokens=8, temperature=1.0, top_k=0, seed=9),
    # As many stop tokens as before find the room made, so this slot is not a new one.
    SamplingConfig(max_new_tokens=8, min_new_tokens=6, stop_token_ids=tuple(range(0, 97, 2))),
]


@pytest.mark.parametrize("order", [1, -1, 5])
@pytest.mark.parametrize("slots", [1, 2])
def test_settings_of_the_row_before_in_a_slot(model, order, slots):
    """Guards against histories, held stops, stop ids, filters, temperatures or streams of the row before."""
    settings = [_SETTINGS[index * order % len(_SETTINGS)] for index in range(len(_SETTINGS))]
    rows = prompts(7, rows=len(settings))
    engine = engine_of(model, max_slots=slots)
    expected = [alone(model, row, sampling) for row, sampling in zip(rows, settings, strict=True)]
    assert tokens(engine.generate(rows, settings)) == expected
    captures = engine.captures
    assert tokens(engine.generate(rows, settings)) == expected
    assert engine.captures == captures


@pytest.mark.parametrize("order", [1, -1, 5])
def test_settings_of_the_call_before(model, order):
    """Guards against the same from call to call."""
    engine = engine_of(model, max_slots=1)
    for index in range(len(_SETTINGS)):
        sampling = _SETTINGS[index * order % len(_SETTINGS)]
        (row,) = prompts(7, rows=1, seed=index)
        (found,) = engine.generate([row], sampling).completions
        (fresh,) = engine_of(model, max_slots=1, capture=False).generate([row], sampling).completions
        assert found.token_ids == fresh.token_ids
        # The temperature of a greedy row shows here alone.
        assert found.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)


def test_penalties_agree_with_generate_after_other_histories(model):
    """Guards against a history that is only ever added to."""
    engine = engine_of(model)
    for seed in range(4):
        check(engine, model, prompts(10, seed=seed), 12, repetition_penalty=1.8)
    check(engine, model, prompts(10, rows=9, seed=9), 12, repetition_penalty=1.8)


def test_stops_agree_with_generate_after_other_stops(model):
    """Guards against stop tokens that outlive their call, and against held ones that are held for the next."""
    engine = engine_of(model)
    rows = prompts(10)
    whole = tokens(check(engine, model, rows, 12))
    for stops in ((whole[0][3], whole[1][5]), (whole[2][4],), ()):
        check(engine, model, rows, 12, stop_token_ids=stops)
    check(engine, model, rows, 12, stop_token_ids=(whole[0][3],), min_new_tokens=8)
    # A stop that comes after it was held ends the row.
    late = next(token for place, token in enumerate(whole[0]) if place > 4 and token not in whole[0][:place])
    ended = check(engine, model, rows, 12, stop_token_ids=(late,), min_new_tokens=3).completions[0]
    assert (ended.stop, ended.token_ids[-1]) == (late, late)
    check(engine, model, rows, 12, stop_token_ids=(whole[0][3],))


@pytest.mark.parametrize("run_ahead", range(6))
def test_early_stops_and_refills(model, run_ahead):
    """Guards against frozen rows that write into pages or slots given away, and against rows moved by a refill."""
    rows = zoo.ragged_prompts(zoo.VOCAB_SIZE, 0, (1, 3, 7, 12, 20, 5, 30, 2, 9, 14, 4))
    eos = zoo.early_eos(model, rows, LONG)
    engine = engine_of(model, run_ahead=run_ahead, page_size=4)
    batch = check(engine, model, rows, LONG, stop_token_ids=(eos,))
    lengths = {len(completion.token_ids) for completion in batch.completions}
    assert len(lengths) > 2
    assert batch.stats.prefill_forwards > 1
    # Running rows keep their slots and pages: only prompts are ever prefilled.
    assert batch.stats.preemptions == 0
    assert batch.stats.prefill_tokens == sum(map(len, rows))
    captures = engine.captures
    again = check(engine, model, rows[::-1], LONG, stop_token_ids=(eos,))
    assert engine.captures == captures <= 3
    assert again.stats.replays == again.stats.decode_steps


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_two_calls_with_refills_use_one_capture(model, run_ahead):
    """Guards against a refill that needs a step of its own."""
    rows = zoo.ragged_prompts(zoo.VOCAB_SIZE, 0, (1, 3, 7, 12, 20))
    eos = zoo.early_eos(model, rows, LONG)
    engine = engine_of(model, max_slots=1, run_ahead=run_ahead)
    check(engine, model, rows, LONG, stop_token_ids=(eos,))
    check(engine, model, rows[::-1], LONG, stop_token_ids=(eos,))
    assert engine.captures == 1


@pytest.mark.parametrize("run_ahead", [0, 1, 4])
def test_preempted_rows_and_reused_pages(model, run_ahead):
    """Guards against keys of the row that had a page before, and histories lost when a row is put back."""
    engine = engine_of(model, kv_tokens=64, page_size=4, run_ahead=run_ahead)
    rows = zoo.ragged_prompts(zoo.VOCAB_SIZE, 5, (12, 9, 3, 14, 8, 1, 11))
    for _ in range(2):
        assert check(engine, model, rows, LONG).stats.preemptions > 0
    batch = check(engine, model, prompts(10, rows=7), LONG, repetition_penalty=1.6)
    assert batch.stats.preemptions > 0
    sampling = SamplingConfig(max_new_tokens=LONG, temperature=1.5, top_k=7, seed=3)
    assert tokens(engine.generate(rows, sampling)) == tokens(
        engine_of(model, max_slots=7, capture=False).generate(rows, sampling)
    )


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("run_ahead", [0, 3])
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_call_that_fails_in_a_prefill(model, error, run_ahead, failing):
    """Guards against rows, pages or captured steps that a broken call leaves behind."""
    engine = engine_of(model, max_slots=2, run_ahead=run_ahead)
    rows = zoo.ragged_prompts(zoo.VOCAB_SIZE, 0, (1, 3, 7, 12, 20))
    budgets = [SamplingConfig(max_new_tokens=4 + index, repetition_penalty=1.5) for index in range(len(rows))]
    engine.generate(rows, budgets)
    captures, flags = engine.captures, [module.training for module in model.modules()]
    prefills = 0

    def fail(module, args):
        nonlocal prefills
        prefills += 1
        if prefills == failing:
            raise error("stop here")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(error, match="stop here"):
        engine.generate(rows, budgets)
    handle.remove()
    assert [module.training for module in model.modules()] == flags
    check(engine, model, rows[:2], 9)
    check(engine, model, prompts(6, rows=5), 9, repetition_penalty=1.5)
    assert engine.recapture_reasons == []
    # The plain sampler at two rows, and at most the rungs of one and two rows of the other.
    assert engine.captures <= captures + 2


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_stream_closed_early(model, taken):
    """Guards against rows of a stream that was left, whose budgets or held stops would go on in the next call."""
    engine = engine_of(model, run_ahead=2)
    settings = [SamplingConfig(max_new_tokens=3 + 4 * index, min_new_tokens=1 + 4 * index) for index in range(9)]
    stream = engine.stream(prompts(7, rows=9), settings)
    for _ in range(taken):
        next(stream)
    stream.close()
    rows = prompts(5, rows=6)
    stop = zoo.reference(model, rows[0], max_new_tokens=3)[-1]
    batch = check(engine, model, rows, 6, stop_token_ids=(stop,), min_new_tokens=1)
    assert len(batch.completions[0].token_ids) == 3


def kept_of_calls():
    """What calls keep of prompts, as far as it is alive."""
    gc.collect()
    return [kept for kept in gc.get_objects() if type(kept) in (PromptLogits, PageAllocator)]


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_a_stream_of_samples_closed_early(model, taken):
    """Guards against pages or logits of a shared prompt that outlive a stream which was left before its last sample."""
    before = kept_of_calls()
    engine = engine_of(model, run_ahead=2, page_size=4)
    rows, sampling = prompts(7, rows=2), SamplingConfig(n=7, temperature=1.5, top_k=0, seed=1, max_new_tokens=9)
    stream = engine.stream(rows, sampling)
    found = {(c.prompt_index, c.sample_index): c.token_ids for c, _ in zip(stream, range(taken), strict=False)}
    stream.close()
    del stream
    assert kept_of_calls() == before
    batch = engine.generate(rows, sampling)
    assert found.items() <= {(c.prompt_index, c.sample_index): c.token_ids for c in batch.completions}.items()
    fresh = engine_of(model, capture=False, page_size=4).generate(rows, sampling)
    assert tokens(batch) == tokens(fresh)
    assert batch.stats.peak_pages == fresh.stats.peak_pages
    assert batch.stats.prefill_tokens == fresh.stats.prefill_tokens == 14
    del batch, fresh
    assert kept_of_calls() == before


def test_logits_are_kept_for_waiting_samples_alone(model):
    """Guards against the logits of every prompt of a call piling up on the device."""
    before = kept_of_calls()
    engine = engine_of(model, max_slots=1)
    stream = engine.stream(prompts(7, rows=3), SamplingConfig(n=3, temperature=1.5, seed=1, max_new_tokens=2))
    sizes = []
    for _ in stream:
        (kept,) = [kept for kept in kept_of_calls() if type(kept) is PromptLogits and kept not in before]
        sizes.append(len(kept._rows))
    assert sizes == [1, 1, 0] * 3


def test_a_step_interrupted_half_way(model):
    """Guards against a step's input that is taken to be loaded and is not."""
    engine: RolloutEngine = engine_of(model)
    check(engine, model, prompts(8))
    head, steps = model.lm_head.forward, 0

    def fail(hidden):
        nonlocal steps
        steps += 1
        if steps == 3:
            raise KeyboardInterrupt
        return head(hidden)

    model.lm_head.forward = fail
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts(20, rows=3), SamplingConfig(max_new_tokens=8))
    model.lm_head.forward = head
    check(engine, model, prompts(8, rows=3))
    check(engine, model, prompts(8))
    assert engine.captures == 1
