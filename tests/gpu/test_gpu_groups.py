"""Shared prompts on a GPU: pages copied by a kernel, between captured steps."""

import pytest
import torch
from zoo import VOCAB_SIZE, build, ragged_prompts

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig

PROMPTS = ragged_prompts(VOCAB_SIZE, seed=31, lengths=(1, 15, 16, 17, 40))
GROUPS = SamplingConfig(n=6, temperature=1.0, top_k=0, seed=3, max_new_tokens=24)


def drawn(model, **config):
    batch = RolloutEngine(model, config=RolloutConfig(**config)).generate(PROMPTS, GROUPS)
    return batch.stats, [completion.token_ids for completion in batch.completions]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_samples_equal_those_that_share_nothing(name):
    """Guards against pages copied too late, too early or in part; `model.generate` repeats each prompt instead."""
    model = build(name).cuda()
    _, expected = drawn(model, prefill_route="ordinary")
    tokens = sum(map(len, PROMPTS))
    for config in (
        {"max_slots": 32},
        {"max_slots": 32, "page_size": 4, "capture": False},
        {"max_slots": 4, "page_size": 4, "run_ahead": 4},
        {"max_slots": 1},
        {"max_slots": 32, "prefill_route": "equal_width"},
        {"max_slots": 32, "prefill_route": "per_prompt", "page_size": 1},
    ):
        stats, found = drawn(model, **config)
        assert found == expected, config
        assert stats.prefill_tokens - stats.padded_tokens == tokens
        assert stats.shared_tokens == 5 * tokens


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("config", [{}, {"max_slots": 9, "run_ahead": 4}, {"kv_tokens": 300}, {"capture": False}])
def test_keys_read_once(name, config):
    """Guards against rows that read a prompt of others in a captured step, after rows have ended or taken a slot."""
    model = build(name).cuda()
    settings = {"max_slots": 32, "page_size": 4, **config}
    told, expected = drawn(model, cascade=False, **settings)
    stats, found = drawn(model, cascade=True, **settings)
    assert found == expected
    assert told.cascade_steps == 0 < stats.cascade_steps
    assert stats.preemptions == told.preemptions
    assert ("kv_tokens" in config) == (stats.preemptions > 0)


def test_calls_that_share_and_calls_that_do_not():
    """Guards against one captured step for both, and against steps captured again by turns."""
    engine = RolloutEngine(build("llama").cuda(), config=RolloutConfig(cascade=True, page_size=4))
    alone = SamplingConfig(max_new_tokens=8)
    first = [engine.generate(PROMPTS, settings) for settings in (GROUPS, alone)]
    captures = engine.captures
    again = [engine.generate(PROMPTS, settings) for settings in (GROUPS, alone)]
    assert [batch.stats.cascade_steps > 0 for batch in again] == [True, False]
    for one, other in zip(first, again, strict=True):
        assert [completion.token_ids for completion in one.completions] == [
            completion.token_ids for completion in other.completions
        ]
    assert (engine.captures, engine.recapture_reasons) == (captures, [])


@pytest.mark.parametrize("slots", [4, 32])
def test_too_few_pages(slots):
    """Guards against pages given up while a step in flight still reads them."""
    model = build("llama").cuda()
    _, expected = drawn(model, prefill_route="ordinary")
    stats, found = drawn(model, max_slots=slots, page_size=4, kv_tokens=64, run_ahead=4)
    assert found == expected
    assert stats.preemptions > 0
    assert stats.peak_pages == 16


def test_copies_of_pages_take_no_memory():
    """Guards against a copy by way of a second one: it is made where memory is short."""
    model = build("llama").cuda()
    engine = RolloutEngine(model, config=RolloutConfig(max_slots=64, max_length=512))
    engine.generate([PROMPTS[0]], SamplingConfig(max_new_tokens=2))
    storage = engine._decoder.storage
    sources, targets = torch.arange(1, 900, device="cuda"), torch.arange(1001, 1900, device="cuda")
    for tensor in (*storage.keys, *storage.values):
        tensor.normal_()
    before = [tensor.clone() for tensor in (*storage.keys, *storage.values)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    storage.copy_pages(sources, targets)
    assert torch.cuda.max_memory_allocated() == held
    for tensor, old in zip((*storage.keys, *storage.values), before, strict=True):
        assert torch.equal(tensor[targets], old[sources])
        assert torch.equal(tensor[:1001], old[:1001])
