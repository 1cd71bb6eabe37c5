"""Sampled tokens depend on seed, prompt and settings alone, and follow the exact distribution of the model."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pytest
import torch
from frequencies import assert_drawn_from
from plain_sampler import plain_kept, plain_logprobs, plain_scores
from warpers import warped_probs
from zoo import ARCHITECTURES, VOCAB_SIZE, build, early_eos, ragged_prompts, reference, shared

from liveroll import CostModel, RolloutConfig, RolloutEngine, SamplingConfig

ROUTES = ("packed", "equal_width", "per_prompt", "bucketed", "auto", "ordinary")
PAGED = ROUTES[:5]
# Several buckets; auto goes by the size of the admission.
COSTS = CostModel(fixed_ms=0.5, packed_fixed_ms=1.5, packed_token_ms=0.05)
BUDGET = 16
PROMPTS = ragged_prompts(VOCAB_SIZE, seed=21)
# `generate` has top_k=50 where nobody says otherwise.
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
# One setting for each of the five prompts; the temperatures leave several tokens likely.
MIXED = [
    SamplingConfig(temperature=1.5, n=3, seed=7, max_new_tokens=BUDGET),
    SamplingConfig(temperature=2.0, n=2, seed=8, max_new_tokens=BUDGET - 5, top_k=20, top_p=0.9, min_p=0.02),
    SamplingConfig(temperature=0, max_new_tokens=BUDGET - 2, repetition_penalty=1.4),
    SamplingConfig(temperature=1.8, n=3, seed=7, max_new_tokens=BUDGET, repetition_penalty=1.2),
    SamplingConfig(temperature=1.0, n=2, seed=9, max_new_tokens=BUDGET - 9),
]

each_route = pytest.mark.parametrize("route", ROUTES)


def engine(model="llama", **settings):
    model = shared(model) if isinstance(model, str) else model
    return RolloutEngine(model, config=RolloutConfig(**{"page_size": 4, "max_slots": 4, "costs": COSTS, **settings}))


def tokens(batch):
    return [completion.token_ids for completion in batch.completions]


def assert_same(batch, expected):
    """The same tokens, and log-probabilities that differ by rounding only: twice what one forward may be off."""
    assert tokens(batch) == tokens(expected)
    for ours, theirs in zip(batch.completions, expected.completions, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=4e-5)


@cache
def mixed():
    return engine().generate(PROMPTS, MIXED)


@pytest.mark.thinned(3)
@each_route
@pytest.mark.parametrize("slots", [1, 2, 8])
def test_slots_and_route_do_not_matter(route, slots):
    """Guards against draws that depend on the batch, the slot, or how the prompt was prefilled."""
    assert_same(engine(max_slots=slots, prefill_route=route).generate(PROMPTS, MIXED), mixed())


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_capture_and_steps_in_flight_do_not_matter(capture, ahead):
    """Guards against results that are taken for those of another step or row."""
    assert_same(engine(capture=capture, run_ahead=ahead).generate(PROMPTS, MIXED), mixed())


@pytest.mark.thinned(3)
@each_route
@pytest.mark.parametrize("order", [(4, 3, 2, 1, 0), (2, 0, 4, 1, 3)])
def test_order_of_prompts_does_not_matter(route, order):
    """Guards against draws that depend on the place of a prompt in the call."""
    batch = engine(prefill_route=route).generate([PROMPTS[i] for i in order], [MIXED[i] for i in order])
    drawn = {(order[c.prompt_index], c.sample_index): c.token_ids for c in batch.completions}
    assert drawn == {(c.prompt_index, c.sample_index): c.token_ids for c in mixed().completions}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("route", PAGED)
@pytest.mark.parametrize("ahead", [0, 2])
def test_preemption_does_not_matter(route, ahead):
    """Guards against a preempted row that loses tokens, draws others, or attends to pages given away."""
    batch = engine(max_slots=8, kv_tokens=72, prefill_route=route, run_ahead=ahead).generate(PROMPTS, MIXED)
    assert batch.stats.preemptions >= 3
    assert batch.stats.peak_pages <= 72 // 4
    assert_same(batch, mixed())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("route", PAGED)
@pytest.mark.parametrize("limit", [len(PROMPTS[-1]), len(PROMPTS[-1]) + 3])
def test_prefill_limit_does_not_matter(route, limit):
    """Guards against an admission whose forwards are put together wrongly."""
    config = {"max_slots": 8, "prefill_route": route, "prefill_max_tokens": limit}
    assert_same(engine(**config).generate(PROMPTS, MIXED), mixed())
    squeezed = engine(**config, kv_tokens=72).generate(PROMPTS, MIXED)
    assert squeezed.stats.preemptions >= 3
    assert_same(squeezed, mixed())


@each_route
def test_samples_of_a_prompt(route):
    """Guards against equal samples, and a group that depends on how it was asked for."""
    one, settings = PROMPTS[2], SamplingConfig(temperature=1.5, top_k=0, seed=3, max_new_tokens=BUDGET)
    group = engine(prefill_route=route).generate([one], SamplingConfig(**{**vars(settings), "n": 6}))
    assert len(set(tokens(group))) == 6
    assert [completion.sample_index for completion in group.completions] == list(range(6))
    assert tokens(engine(prefill_route=route).generate([one] * 6, settings)) == tokens(group)


def test_a_larger_budget_keeps_the_first_tokens():
    """Guards against draws that depend on how many tokens were asked for."""

    def drawn(budget):
        sampling = SamplingConfig(temperature=1.5, seed=3, n=2, max_new_tokens=budget)
        return tokens(engine().generate(PROMPTS[:3], sampling))

    assert [row[:6] for row in drawn(BUDGET)] == drawn(6)


def test_seeds():
    """Guards against a seed that is ignored, calls that repeat one another, and calls that cannot be repeated."""

    def drawn(seed, rollout):
        return tokens(rollout.generate(PROMPTS[:2], SamplingConfig(temperature=1.5, seed=seed, max_new_tokens=8)))

    first, second, other = engine(), engine(), engine(seed=1)
    assert drawn(5, first) == drawn(5, first) == drawn(5, other)
    assert drawn(5, first) != drawn(6, first)
    calls = [drawn(None, second) for _ in range(3)]
    assert len(set(map(tuple, calls))) == 3
    third = engine()
    assert [drawn(None, third) for _ in range(3)] == calls
    assert drawn(None, other) not in calls


@torch.no_grad()
def forced_logits(model, prompt, response):
    """The model's logits in front of every token of a response."""
    return model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]


def assert_logprobs(model, prompt, completion, **setting):
    """Within 2e-5 of the model's own forward, or twice as far as that is from itself in float64, if that is more."""

    def expected(model):
        logits = forced_logits(model, prompt, completion.token_ids)
        for index, token in enumerate(completion.token_ids):
            history = [*prompt, *completion.token_ids[:index]]
            yield warped_probs(logits[index], history, **setting)[token].log().item()

    own = list(expected(model))
    if completion.logprobs != pytest.approx(own, abs=2e-5):
        exact = expected(copy.deepcopy(model).double())
        for logprob, forward, true in zip(completion.logprobs, own, exact, strict=True):
            assert logprob == pytest.approx(forward, abs=max(2e-5, 2 * abs(forward - true)))


SETTINGS = (
    {},
    {"temperature": 1.6},
    {"temperature": 2.0, "top_k": 25, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_equal_a_forward_over_the_response(name):
    """Guards against log-probabilities of another distribution than the one drawn from, in any architecture."""
    sampling = [SamplingConfig(**{**NEUTRAL, "seed": 4, "max_new_tokens": 12, **one}) for one in SETTINGS]
    batch = engine(name).generate(PROMPTS[2:], sampling)
    for completion, setting in zip(batch.completions, SETTINGS, strict=True):
        assert_logprobs(shared(name), PROMPTS[2 + completion.prompt_index], completion, **setting)


# Of one batch: everything, a filter alone, temperature alone, greedy with penalties, and nothing told.
EVERYTHING = [
    {
        "temperature": 2.0,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {3: 2.0, 50: -1.0},
        "forbidden_tokens": (4, 60),
    },
    {"temperature": 1.5, "top_p": 0.8, "stop_token_ids": (5,), "min_new_tokens": 12, "n": 3},
    {"temperature": 1.5},
    {"temperature": 0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 1.2, "min_p": 0.05},
]


def assert_everything(model, prompt, completion, sampling):
    """All that is told of each token is what one forward over the finished sequence and the plain sampler say."""
    # Two forwards in fp32 differ by up to 4e-5 on these models, each as far from double precision as the other.
    near = {"abs": 5e-5}
    differences = []
    logits = forced_logits(model, prompt, completion.token_ids)
    raw = logits.double().log_softmax(-1)
    assert (completion.kept_tokens is None) == (not sampling.truncates)
    for index, token in enumerate(completion.token_ids):
        scores = plain_scores(logits[index].tolist(), prompt, completion.token_ids[:index], sampling)
        kept, margin = plain_kept(scores, sampling)
        expected = plain_logprobs(scores, kept)
        assert completion.raw_logprobs[index] == pytest.approx(raw[index, token].item(), **near)
        differences.append(abs(completion.raw_logprobs[index] - raw[index, token].item()))
        if margin > 1e-4:  # else the last digit of the logits decides about a token
            assert completion.logprobs[index] == pytest.approx(expected[token], **near)
            differences.append(abs(completion.logprobs[index] - expected[token]))
            assert completion.kept_tokens is None or set(completion.kept_tokens[index]) == kept
            ids, logprobs = zip(*completion.top_logprobs[index], strict=True)
            assert len(ids) == min(5, len(kept))
            assert logprobs == pytest.approx(sorted(expected, reverse=True)[: len(ids)], **near)
            assert [expected[other] for other in ids] == pytest.approx(logprobs, **near)
    assert np.mean(differences) < 1e-5


def everything(name, **config):
    told = {"raw_logprobs": True, "top_logprobs": 5, "kept_tokens": VOCAB_SIZE, "max_new_tokens": 12, "seed": 4}
    sampling = [SamplingConfig(**{**NEUTRAL, **told, **one}) for one in EVERYTHING]
    return engine(name, **config).generate(PROMPTS, sampling)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_that_is_told_of_a_token(name):
    """Guards against details of another row, step or distribution, in any architecture and with all settings mixed."""
    batch = everything(name)
    for completion in batch.completions:
        sampling = batch.sampling[completion.prompt_index]
        assert_everything(shared(name), PROMPTS[completion.prompt_index], completion, sampling)


@pytest.mark.parametrize(
    "config",
    [
        {"prefill_route": "ordinary", "max_slots": 3},
        {"prefill_route": "equal_width", "max_slots": 2, "run_ahead": 2},
        {"max_slots": 8, "kv_tokens": 48},
        {"capture": False, "max_slots": 1},
    ],
    ids=str,
)
def test_all_that_is_told_on_every_way(config):
    """Guards against details lost or mixed up by refills, preemption, steps in flight, or the ordinary route."""
    batch = everything("llama", **config)
    assert "kv_tokens" not in config or batch.stats.preemptions >= 2
    expected = everything("llama")
    assert tokens(batch) == tokens(expected)
    for ours, theirs in zip(batch.completions, expected.completions, strict=True):
        assert ours.kept_tokens == theirs.kept_tokens
        assert_everything(shared("llama"), PROMPTS[ours.prompt_index], ours, batch.sampling[ours.prompt_index])
    for whole, field in ((batch.response_logprobs, "logprobs"), (batch.response_raw_logprobs, "raw_logprobs")):
        assert whole.dtype == torch.float32
        for row, completion in zip(whole, batch.completions, strict=True):
            told = getattr(completion, field)
            assert row.tolist() == pytest.approx([*told, *[0.0] * (len(row) - len(told))], abs=1e-7)


@each_route
def test_logprobs_of_every_route(route):
    """Guards against log-probabilities that belong to another row or step, also where rows were preempted."""
    limits = {"max_slots": 3} if route == "ordinary" else {"max_slots": 8, "kv_tokens": 48}
    batch = engine(prefill_route=route, **limits).generate(
        PROMPTS, SamplingConfig(temperature=1.5, top_k=0, seed=4, n=2, max_new_tokens=BUDGET)
    )
    assert route == "ordinary" or batch.stats.preemptions
    for completion in batch.completions:
        assert_logprobs(shared("llama"), PROMPTS[completion.prompt_index], completion, temperature=1.5)


def test_logprobs_of_greedy_responses():
    """Guards against a temperature in the log-probabilities of a greedy response."""
    batch = engine().generate(PROMPTS, SamplingConfig(temperature=0, repetition_penalty=1.3, max_new_tokens=BUDGET))
    for completion in batch.completions:
        prompt = PROMPTS[completion.prompt_index]
        assert_logprobs(shared("llama"), prompt, completion, repetition_penalty=1.3)


@pytest.mark.parametrize("route", ROUTES)
def test_logprobs_are_left_out_where_not_asked_for(route):
    """Guards against a setting without effect."""
    sampling = [SamplingConfig(temperature=1.0, max_new_tokens=3, logprobs=asked) for asked in (True, False)]
    batch = engine(prefill_route=route).generate(PROMPTS[:2], sampling)
    first, second = batch.completions
    assert len(first.logprobs) == 3
    assert second.logprobs is None
    assert batch.response_logprobs is None
    asked = [{"raw_logprobs": True}, {"top_logprobs": 2}, {"kept_tokens": 9, "top_k": 4}, {}]
    told = [SamplingConfig(**{**NEUTRAL, "max_new_tokens": 3, **one}) for one in asked]
    batch = engine(prefill_route=route).generate(PROMPTS[:4], told)
    for index, completion in enumerate(batch.completions):
        details = (completion.raw_logprobs, completion.top_logprobs, completion.kept_tokens)
        assert [detail is not None for detail in details] == [index == 0, index == 1, index == 2]
    assert [len(pairs) for pairs in batch.completions[1].top_logprobs] == [2, 2, 2]
    assert [len(ids) for ids in batch.completions[2].kept_tokens] == [4, 4, 4]
    assert batch.response_raw_logprobs is None


def test_more_kept_tokens_than_asked_for():
    """Guards against a list that is cut off and taken for the whole set."""
    setting = {**NEUTRAL, "max_new_tokens": 12, "temperature": 2.0, "top_p": 0.8, "seed": 4}
    whole = engine().generate(PROMPTS, SamplingConfig(**setting, kept_tokens=VOCAB_SIZE))
    some = engine().generate(PROMPTS, SamplingConfig(**setting, kept_tokens=12))
    lists = [
        (ours, theirs)
        for a, b in zip(some.completions, whole.completions, strict=True)
        for ours, theirs in zip(a.kept_tokens, b.kept_tokens, strict=True)
    ]
    assert {ours is None for ours, _ in lists} == {True, False}
    assert all(ours == (theirs if len(theirs) <= 12 else None) for ours, theirs in lists)


@cache
def stopped_responses(name, least):
    """A token that ends some greedy responses early, and what `generate` answers with it as a stop."""
    model = shared(name)
    stop = early_eos(model, PROMPTS, 24)
    settings = {"max_new_tokens": 24, "min_new_tokens": least, "eos_token_id": [stop, 3], "pad_token_id": 0}
    return stop, [reference(model, prompt, **settings) for prompt in PROMPTS]


@pytest.mark.thinned(4)
@each_route
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("least", [0, 6, 24])
def test_min_new_tokens_and_stop_tokens_as_in_generate(route, name, least):
    """Guards against a stop before its time, one that is missed, and a bar that outlasts it."""
    stop, expected = stopped_responses(name, least)
    sampling = SamplingConfig(max_new_tokens=24, min_new_tokens=least, stop_token_ids=(stop, 3), temperature=0)
    batch = engine(name, prefill_route=route, max_slots=2).generate(PROMPTS, sampling)
    assert [list(row) for row in tokens(batch)] == expected
    for completion in batch.completions:
        last = completion.token_ids[-1]
        ended = ("stop", last) if last in (stop, 3) else ("length", None)
        assert (completion.finish_reason, completion.stop) == ended
        assert len(completion.token_ids) > least or least in (0, 24)


SMALL = 5
STOP = 2
LENGTH = 3


@cache
def small_model():
    return build("llama", vocab_size=SMALL)


def exact_distribution(prompt, **setting):
    """Probability of every response of at most three tokens, none of which stops before its second token."""
    model, found = small_model(), {}

    def extend(response, probability):
        if len(response) == LENGTH or response[-1:] == (STOP,):
            found[response] = probability
            return
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, -1]
        if not response:
            logits[STOP] = float("-inf")
        for token, share in enumerate(warped_probs(logits, [*prompt, *response], **setting).tolist()):
            extend((*response, token), probability * share)

    extend((), 1.0)
    return found


@pytest.mark.parametrize("route", ["packed", "ordinary"])
@pytest.mark.parametrize("setting", [{"temperature": 3.0}, {"temperature": 3.5, "top_k": 4, "repetition_penalty": 1.5}])
def test_responses_follow_the_exact_distribution(route, setting):
    """Guards against draws that depend on one another along a response or within a group."""
    prompt = [1, 4, 0]
    sampling = SamplingConfig(
        **setting, n=3000, seed=1, max_new_tokens=LENGTH, min_new_tokens=1, stop_token_ids=(STOP,)
    )
    batch = engine(small_model(), max_slots=300, prefill_route=route).generate([prompt], sampling)
    exact = exact_distribution(prompt, **setting)
    drawn = tokens(batch)
    assert set(drawn) <= set(exact)
    counts = np.array([drawn.count(response) for response in exact])
    probs = np.array(list(exact.values()))
    assert_drawn_from(probs, counts)
    first = np.array([response[0] for response in exact])
    assert_drawn_from(np.bincount(first, probs), np.bincount(first, counts))
