"""Samples that share a prompt, and its pages, come to what each comes to by itself, in fp32."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from zoo import VOCAB_SIZE, build, ragged_prompts, reference, shared

from liveroll import RolloutConfig, RolloutEngine, RolloutRequest, SamplingConfig
from liveroll.types import RolloutBatch

PAGED = ("packed", "equal_width", "per_prompt")
BUDGET = 12
PROMPTS = ragged_prompts(VOCAB_SIZE, seed=31, lengths=(1, 4, 7, 16, 17))
TOKENS = sum(map(len, PROMPTS))
GROUPS = SamplingConfig(n=5, temperature=1.5, top_k=0, seed=3, max_new_tokens=BUDGET)

each_route = pytest.mark.parametrize("route", PAGED)


def engine(name="llama", **settings):
    return RolloutEngine(shared(name), config=RolloutConfig(**{"page_size": 4, "max_slots": 32, **settings}))


def tokens(batch):
    return [completion.token_ids for completion in batch.completions]


@cache
def apart(name="llama", sampling=GROUPS) -> RolloutBatch:
    """The same samples by `model.generate` over repeated prompts, which share nothing; the sampler is ours."""
    return engine(name, prefill_route="ordinary").generate(PROMPTS, sampling)


def assert_same(batch, expected):
    assert tokens(batch) == tokens(expected)
    for ours, theirs in zip(batch.completions, expected.completions, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@each_route
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_samples_equal_those_that_share_nothing(route, page_size):
    """Guards against a sample that reads or writes another's keys, or draws from another's logits."""
    batch = engine(prefill_route=route, page_size=page_size).generate(PROMPTS, GROUPS)
    assert_same(batch, apart())
    assert batch.stats.prefill_tokens - batch.stats.padded_tokens == TOKENS
    assert batch.stats.shared_tokens == 4 * TOKENS


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "gpt_oss", "mistral", "qwen3"])
def test_samples_of_other_models(name):
    """Guards against windows, sinks and positions that are off in pages which another row has written."""
    assert_same(engine(name).generate(PROMPTS, GROUPS), apart(name))


@each_route
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_greedy_samples_are_those_of_generate(route, page_size):
    """Guards against a copy that differs from what it is a copy of."""
    sampling = SamplingConfig(n=3, temperature=0, max_new_tokens=BUDGET)
    batch = engine(prefill_route=route, page_size=page_size).generate(PROMPTS, sampling)
    expected = [reference(shared("llama"), prompt, max_new_tokens=BUDGET) for prompt in PROMPTS]
    assert [list(row) for row in tokens(batch)] == [row for row in expected for _ in range(3)]


@pytest.mark.thinned(3)
@each_route
@pytest.mark.parametrize(("slots", "ahead"), [(1, 0), (3, 2), (8, 0)])
def test_fewer_slots_than_samples(route, slots, ahead):
    """Guards against later samples that run their prompt again, or find its last page written over."""
    batch = engine(prefill_route=route, max_slots=slots, run_ahead=ahead).generate(PROMPTS, GROUPS)
    assert_same(batch, apart())
    assert batch.stats.prefill_tokens - batch.stats.padded_tokens == TOKENS
    assert batch.stats.shared_tokens == 4 * TOKENS


@each_route
@pytest.mark.parametrize(("slots", "ahead"), [(4, 3), (32, 0)])
def test_too_few_pages(route, slots, ahead):
    """Guards against pages given up that a row still reads, and rows that come back to the wrong ones."""
    # The longest row alone takes all of them.
    batch = engine(prefill_route=route, max_slots=slots, run_ahead=ahead, kv_tokens=28).generate(PROMPTS, GROUPS)
    assert_same(batch, apart())
    assert batch.stats.preemptions > 0
    assert batch.stats.prefill_tokens > TOKENS
    assert batch.stats.peak_pages == 7


@pytest.mark.parametrize(("kv_tokens", "times"), [(52, 1), (48, 2)])
def test_a_prompt_is_given_up_before_a_row(kv_tokens, times):
    """Guards against a row preempted, or a call that fails, for the sake of pages that only wait for a sample."""
    first, second = PROMPTS[3:]
    sampling = [
        SamplingConfig(temperature=0, max_new_tokens=30, stop_token_ids=tuple(range(VOCAB_SIZE))),
        SamplingConfig(temperature=0, max_new_tokens=20),
        SamplingConfig(temperature=0, max_new_tokens=10),
    ]
    prompts = [first, second, first]
    # While the second prompt's row comes to 36 keys, the first one's 16 are kept for its second sample.
    batch = engine(max_slots=1, kv_tokens=kv_tokens).generate(prompts, sampling)
    assert_same(batch, engine(prefill_route="ordinary", max_slots=1).generate(prompts, sampling))
    assert batch.stats.prefill_tokens == times * len(first) + len(second)
    assert batch.stats.preemptions == 0


def test_equal_prompts_with_settings_of_their_own():
    """Guards against one sample's settings, budget or history in another's row: only keys and logits are shared."""
    prompt = PROMPTS[2]
    settings = [
        SamplingConfig(temperature=0, max_new_tokens=9),
        SamplingConfig(temperature=0, max_new_tokens=5, repetition_penalty=1.8),
        SamplingConfig(temperature=1.5, top_k=5, seed=1, n=2, max_new_tokens=12),
        SamplingConfig(temperature=2.0, top_k=0, top_p=0.8, seed=2, max_new_tokens=1),
        SamplingConfig(temperature=1.5, top_k=5, seed=1, n=2, max_new_tokens=12, min_new_tokens=4),
        SamplingConfig(temperature=0, max_new_tokens=9, stop_token_ids=tuple(range(0, VOCAB_SIZE, 3))),
    ]
    batch = engine(max_slots=3).generate([prompt] * len(settings), settings)
    assert_same(batch, engine(prefill_route="ordinary", max_slots=1).generate([prompt] * len(settings), settings))
    assert batch.stats.prefill_tokens == len(prompt)


def test_prompts_that_begin_alike():
    """Guards against prompts taken for equal because one begins with the other, or holds the same tokens."""
    whole = PROMPTS[3]
    prompts = [whole, whole[:-1], whole[1:], whole[::-1], whole, [*whole, 5]]
    batch = engine().generate(prompts, replace(GROUPS, n=2))
    assert_same(batch, engine(prefill_route="ordinary").generate(prompts, replace(GROUPS, n=2)))
    assert batch.stats.prefill_tokens == sum(map(len, prompts)) - len(whole)
    assert batch.stats.shared_tokens == sum(map(len, prompts)) + len(whole)


def test_padding_of_their_own():
    """Guards against padding that counts as history in one row and is taken for another's with the same prompt."""
    ids = torch.tensor([[9, 9, 5, 6], [7, 7, 5, 6]])
    request = RolloutRequest(ids, torch.tensor([[0, 0, 1, 1]] * 2))
    sampling = SamplingConfig(temperature=0, max_new_tokens=BUDGET, repetition_penalty=1.6)
    batch = engine().generate(request, sampling)
    assert_same(batch, engine(prefill_route="ordinary", max_slots=1).generate(request, sampling))
    assert batch.stats.prefill_tokens == 2


@each_route
@pytest.mark.parametrize("slots", [2, 16])
def test_some_samples_end_with_their_first_token(route, slots):
    """Guards against a sample that ends before it has written a key and takes the others' pages with it."""
    sampling = replace(GROUPS, n=8, stop_token_ids=tuple(range(0, VOCAB_SIZE, 3)))
    batch = engine(prefill_route=route, max_slots=slots).generate(PROMPTS, sampling)
    assert_same(batch, engine(prefill_route="ordinary").generate(PROMPTS, sampling))
    lengths = [len(row) for row in tokens(batch)]
    assert any(len({*lengths[i : i + 8]} & {1}) and max(lengths[i : i + 8]) > 1 for i in range(0, 40, 8))


@pytest.mark.parametrize("capture", [True, False])
def test_capture_does_not_matter(capture):
    """Guards against copies of pages that a captured step does not see, or that count as a change."""
    rollouts = engine(capture=capture, max_slots=8)
    assert_same(rollouts.generate(PROMPTS, GROUPS), apart())
    captures = rollouts.captures
    assert_same(rollouts.generate(PROMPTS, GROUPS), apart())
    assert rollouts.captures == captures


def test_pages_do_not_outlive_a_change_of_weights_in_place():
    """Guards against a prompt whose keys are taken from the call before: neither address nor version has changed."""
    model = build("llama")
    rollouts = RolloutEngine(model, config=RolloutConfig(page_size=4, max_slots=2))
    before = tokens(rollouts.generate(PROMPTS, GROUPS))
    versions = [(parameter.data_ptr(), parameter._version) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.mul_(0.8)
    assert versions == [(parameter.data_ptr(), parameter._version) for parameter in model.parameters()]
    batch = rollouts.generate(PROMPTS, GROUPS)
    expected = RolloutEngine(model, config=RolloutConfig(prefill_route="ordinary")).generate(PROMPTS, GROUPS)
    assert_same(batch, expected)
    assert tokens(batch) != before
    assert batch.stats.prefill_tokens == TOKENS
    assert rollouts.recapture_reasons == []
