"""What a captured prefill depends on, what is kept of it, and what it leaves alone, with exact counts."""

from __future__ import annotations

import re

import pytest
import torch
import zoo
from rollouts import BUDGET, check, engine_of, prompts, tokens
from test_hooks import Counter, give_accelerate_hook, kept_hooks

from liveroll import CaptureError, ConfigError, RolloutConfig, SamplingConfig

GREEDY = SamplingConfig(max_new_tokens=BUDGET)


@pytest.fixture
def model():
    return zoo.build("llama")


def capturing(model, **settings):
    return engine_of(model, prefill_capture=True, **settings)


def test_a_repeat_call_only_replays(model):
    """Guards against a capture for each call or prompt width, and counts of one kind that go to the other."""
    engine = capturing(model)
    for calls, width in enumerate((8, 12, 8, 3, 16), 1):
        stats = check(engine, model, prompts(width)).stats
        assert (stats.prefill_captures, stats.prefill_replays) == (int(calls == 1), 1)
        assert (stats.captures, stats.replays) == (int(calls == 1), BUDGET - 1)
        assert (stats.prefill_tokens, stats.padded_tokens) == (64, 64 - 4 * width)
    assert (engine.prefill_captures, engine.prefill_replays) == (1, 5)
    assert (engine.captures, engine.replays) == (1, 5 * (BUDGET - 1))
    check(engine, model, prompts(17))
    assert (engine.prefill_captures, engine.captures) == (2, 1)
    assert engine.recapture_reasons == []


def test_prefills_are_captured_by_themselves_on_a_gpu_only(model):
    """Guards against forwards that are filled up where replaying gains nothing, and against silence about it."""
    stats = check(engine_of(model), model, prompts(8)).stats
    assert (stats.prefill_captures, stats.padded_tokens) == (0, 0)
    assert stats.prefill_eager_reason == "prefill_capture='auto' captures prefills on a GPU only"
    assert stats.eager_reason is None
    stats = check(engine_of(model, prefill_capture=False), model, prompts(8)).stats
    assert stats.prefill_eager_reason == "RolloutConfig.prefill_capture is False"
    stats = check(engine_of(model, capture=False), model, prompts(8)).stats
    assert stats.prefill_eager_reason == "RolloutConfig.capture is False"
    assert check(capturing(model), model, prompts(8)).stats.prefill_eager_reason is None


def test_settings_that_exclude_one_another():
    """Guards against a demand that is never met, without a word."""
    with pytest.raises(ConfigError, match="prefill_capture is True and capture False"):
        RolloutConfig(prefill_capture=True, capture=False)
    RolloutConfig(prefill_capture="auto", capture=False)


def test_values_changed_in_place_are_seen_without_a_capture(model):
    """Guards against first tokens of the weights that were captured, and a capture for every optimizer step."""
    engine = capturing(model)
    first = [row[0] for row in tokens(check(engine, model, prompts(8)))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(input_ids=torch.tensor(prompts(8)), labels=torch.tensor(prompts(8))).loss.backward()
    optimizer.step()
    assert [row[0] for row in tokens(check(engine, model, prompts(8)))] != first
    assert (engine.prefill_captures, engine.captures) == (1, 1)
    assert engine.recapture_reasons == []


def test_a_moved_parameter_is_captured_again(model):
    """Guards against a prefill that reads memory which a parameter has left."""
    engine = capturing(model)
    check(engine, model, prompts(8), budget=1)
    check(engine, model, prompts(17), budget=1)
    assert (engine.prefill_captures, engine.captures) == (2, 0)
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(-layer.weight.detach())
    check(engine, model, prompts(8), budget=1)
    assert engine.prefill_captures == 3
    assert len(engine.recapture_reasons) == 1
    assert "down_proj.weight" in engine.recapture_reasons[0]


def test_new_pages_are_captured_again(model):
    """Guards against a prefill that writes to pages which are gone."""
    engine = capturing(model)
    check(engine, model, prompts(8))
    check(engine, model, prompts(280, rows=2))
    assert (engine.prefill_captures, engine.captures) == (2, 2)
    check(engine, model, prompts(8))
    assert (engine.prefill_captures, engine.captures) == (3, 3)


def test_another_dtype(model):
    """Guards against logits that are kept in the dtype of before."""
    engine = capturing(model)
    check(engine, model, prompts(8))
    model.to(torch.bfloat16)
    again = tokens(engine.generate(prompts(8), GREEDY))
    assert again == tokens(engine_of(model, capture=False).generate(prompts(8), GREEDY))
    with torch.autocast("cpu", dtype=torch.float16):
        again = tokens(engine.generate(prompts(8), GREEDY))
        assert again == tokens(engine_of(model, capture=False).generate(prompts(8), GREEDY))
    assert engine.prefill_captures == 3


def test_release_frees_what_prefills_run_on(model):
    """Guards against inputs, outputs and graphs that outlive a release, and an engine that cannot go on."""
    engine = capturing(model)
    check(engine, model, prompts(8))
    held = engine.memory().static
    engine.release()
    assert engine.memory().total == 0
    check(engine, model, prompts(8))
    assert engine.memory().static == held > engine_memory_without(model)
    assert engine.prefill_captures == 2


def engine_memory_without(model):
    engine = engine_of(model)
    check(engine, model, prompts(8))
    return engine.memory().static


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_prefills_count_among_the_steps_that_are_kept(model, limit):
    """Guards against a limit on decode steps alone, and a prefill that was evicted and is replayed."""
    engine = capturing(model, max_captures=limit)
    for width in (8, 17, 8, 17):
        check(engine, model, prompts(width))
    assert engine.prefill_captures == (2 if limit == 3 else 4)
    assert engine.captures == (4 if limit == 1 else 1)
    assert engine.recapture_reasons == []


def test_forwards_of_one_admission_share_a_limit(model):
    """Guards against the first of several forwards evicted by the capture of the last."""
    engine = capturing(model, max_captures=1, prefill_max_tokens=128)
    rows = zoo.ragged_prompts(zoo.VOCAB_SIZE, 1, [60, 66, 50])
    check(engine, model, rows)
    assert engine.prefill_replays == 2


def test_a_prefill_captured_beside_running_rows(model):
    """Guards against numbers of the forward before, which stand for other pages in a forward that is captured."""
    engine = capturing(model, max_slots=2, page_size=2)
    rows = zoo.ragged_prompts(zoo.VOCAB_SIZE, 2, [60, 50, 9])
    budgets = [40, 2, 20]
    batch = engine.generate(rows, [SamplingConfig(max_new_tokens=budget) for budget in budgets])
    expected = [zoo.reference(model, row, max_new_tokens=b) for row, b in zip(rows, budgets, strict=True)]
    assert tokens(batch) == expected
    assert batch.stats.prefill_captures == batch.stats.prefill_replays == 2


def test_a_short_call_after_a_long_one(model):
    """Guards against tokens, pages and last tokens of the call before that stay where no prompt stands now."""
    engine = capturing(model)
    check(engine, model, prompts(16))
    check(engine, model, prompts(3, rows=1, seed=4))
    check(engine, model, prompts(5, rows=3, seed=5))
    assert engine.prefill_captures == 1


def test_hooks_do_not_run_in_captured_prefills(model):
    """Guards against hooks whose Python runs at capture and never at replay, and against hooks lost on the way."""
    engine = capturing(model)
    engine.generate(prompts(8), GREEDY)
    counter = Counter(model.model.layers[0].mlp)
    before = kept_hooks(model)
    check(engine, model, prompts(8))
    check(engine, model, prompts(17))
    assert engine.prefill_captures == 2
    assert set(counter.widths) <= {8, 17, 1}  # those of the reference
    assert counter.widths.count(1) == 2 * 8 * (BUDGET - 1)
    assert kept_hooks(model) == before


def test_models_whose_hooks_must_run_are_not_captured(model):
    """Guards against a prefill that reads weights which are not there."""
    engine = engine_of(model, prefill_capture="auto")
    reason = give_accelerate_hook(model)
    with pytest.raises(CaptureError, match=re.escape(reason)):
        capturing(model).generate(prompts(8), GREEDY)
    assert check(engine, model, prompts(8)).stats.eager_reason == reason


def test_what_cannot_be_captured(model, monkeypatch):
    """Guards against a failure that is silent, one that is final, and one that does not name its module."""
    inner = model.model.layers[1].mlp
    forward = inner.forward

    def fail(hidden):
        if hidden.shape[1] == 64:
            raise RuntimeError("operation not permitted")
        return forward(hidden)

    inner.forward = fail
    said = r"packed prefills cannot be captured, because of model\.layers\.1\.mlp \(LlamaMLP\): operation not permitted"
    with pytest.raises(CaptureError, match=said + "; set prefill_capture='auto'"):
        capturing(model).generate(prompts(8), GREEDY)
    # What `auto` does on a GPU, where prefills are captured by themselves.
    monkeypatch.setattr("liveroll.prefill.captured.no_prefill_capture", lambda config, device_type: None)
    engine = engine_of(model)
    for _ in range(2):
        stats = check(engine, model, prompts(8)).stats
        assert re.fullmatch(said, stats.prefill_eager_reason)
        assert (stats.prefill_captures, stats.prefill_replays, stats.padded_tokens) == (0, 0, 0)
        assert (stats.replays, stats.eager_reason) == (BUDGET - 1, None)
    del inner.forward
    engine.release()
    stats = check(engine, model, prompts(8)).stats
    assert (stats.prefill_replays, stats.prefill_eager_reason) == (1, None)
