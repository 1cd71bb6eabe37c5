"""With captured prefills, which are filled up with inert tokens, tokens equal `model.generate` in fp32."""

from __future__ import annotations

from functools import cache

import pytest
from zoo import ARCHITECTURES, VOCAB_SIZE, build, early_eos, ragged_prompts, reference, shared, with_eos

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig

BUDGET = 16
# 61 tokens and three more than that: the forwards over them are filled up to 64 and to 128.
PROMPTS = ragged_prompts(VOCAB_SIZE, seed=11, lengths=(1, 20, 7, 30, 3))
LONGER = ragged_prompts(VOCAB_SIZE, seed=12, lengths=(40, 24, 1))


@cache
def alone(name, longer=False):
    return [reference(shared(name), prompt, max_new_tokens=BUDGET) for prompt in (LONGER if longer else PROMPTS)]


def engine(name, **settings):
    return RolloutEngine(shared(name), config=RolloutConfig(**{"prefill_capture": True, "page_size": 4, **settings}))


def tokens(batch):
    return [list(completion.token_ids) for completion in batch.completions]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(name):
    """Guards against inert tokens that others attend to, windows and sinks that are lost, and positions that move."""
    captured = engine(name)
    for prompts, longer in ((PROMPTS, False), (LONGER, True), (PROMPTS, False)):
        batch = captured.generate(prompts, SamplingConfig(max_new_tokens=BUDGET))
        assert tokens(batch) == alone(name, longer)
        assert batch.stats.prefill_replays == batch.stats.prefill_forwards == 1
        assert batch.stats.prefill_tokens == (128 if longer else 64)
        assert batch.stats.prefill_tokens - batch.stats.padded_tokens == sum(map(len, prompts))
    assert captured.prefill_captures == 2


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "gpt_oss"])
def test_early_eos_and_refill(name):
    """Guards against a refill that finds tokens of the prefill before it, or disturbs a running row."""
    model = shared(name)
    stop = early_eos(model, PROMPTS, BUDGET)
    with with_eos(model, stop):
        batch = engine(name, max_slots=2).generate(PROMPTS, SamplingConfig(max_new_tokens=BUDGET))
    assert tokens(batch) == [row[: row.index(stop) + 1] if stop in row else row for row in alone(name)]
    assert batch.stats.prefill_replays == batch.stats.prefill_forwards > 2


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_samples_that_share_a_prompt(page_size):
    """Guards against keys written over a page that others read, and logits that the next forward overwrites."""
    sampling = SamplingConfig(n=5, temperature=1.5, top_k=0, seed=3, max_new_tokens=BUDGET)
    batch = engine("llama", page_size=page_size, max_slots=6).generate(PROMPTS, sampling)
    expected = engine("llama", prefill_capture=False, prefill_route="per_prompt").generate(PROMPTS, sampling)
    assert tokens(batch) == tokens(expected)
    assert batch.stats.prefill_replays == batch.stats.prefill_forwards
    assert batch.stats.shared_tokens > 0


def test_rows_that_come_back_after_preemption():
    """Guards against a context longer than its prompt that is cut, and pages of others that it writes to."""
    batch = engine("llama", kv_tokens=80).generate(PROMPTS, SamplingConfig(max_new_tokens=BUDGET))
    assert tokens(batch) == alone("llama")
    assert batch.stats.preemptions > 0
    assert batch.stats.prefill_replays == batch.stats.prefill_forwards


@pytest.mark.parametrize(
    ("settings", "replays", "forwards"),
    [
        ({"prefill_capture_tokens": 60}, 0, 1),
        ({"prefill_capture_tokens": 61}, 1, 1),
        ({"prefill_max_tokens": 63}, 0, 1),
        ({"prefill_max_tokens": 40, "prefill_capture_tokens": 30}, 1, 2),
    ],
)
def test_only_forwards_within_the_limits_are_captured(settings, replays, forwards):
    """Guards against a forward that is captured beyond its limit, or filled up beyond that on token positions."""
    batch = engine("llama", **settings).generate(PROMPTS, SamplingConfig(max_new_tokens=BUDGET))
    assert tokens(batch) == alone("llama")
    assert (batch.stats.prefill_replays, batch.stats.prefill_forwards) == (replays, forwards)


def test_positions_end_with_the_model():
    """Guards against inert tokens at positions that a model's embedding does not have."""
    model = build("gpt2", max_position_embeddings=24)
    prompts = ragged_prompts(VOCAB_SIZE, seed=5, lengths=(8, 3))
    batch = RolloutEngine(model, config=RolloutConfig(prefill_capture=True)).generate(
        prompts, SamplingConfig(max_new_tokens=BUDGET)
    )
    assert batch.stats.prefill_tokens == 64
    assert tokens(batch) == [reference(model, prompt, max_new_tokens=BUDGET) for prompt in prompts]


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2"])
def test_fused_projections(name):
    """Guards against parts of a joint product that are read as contiguous, and rows of another length."""
    model = build(name)
    fused = RolloutEngine(model, config=RolloutConfig(prefill_capture=True, fuse="auto"))
    for _ in range(2):
        assert tokens(fused.generate(PROMPTS, SamplingConfig(max_new_tokens=BUDGET))) == alone(name)
    assert fused.fusion.fused
    assert (fused.captures, fused.prefill_captures) == (1, 1)
