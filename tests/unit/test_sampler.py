"""Tokens are drawn from transformers' distribution, and their log-probabilities are those of that distribution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import make_request
from frequencies import assert_drawn_from
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import MinNewTokensLengthLogitsProcessor
from warpers import warped_probs, warped_scores

from liveroll.decode.sampler import Rows, Variant, hold, keep_likely, penalise, sample
from liveroll.scheduling.request import Request

VOCAB = 12
DRAWS = 20_000
HISTORY = [0, 3, 3, 7]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 4},
    {"top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.15},
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.7},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
]

steady = settings(deadline=None, derandomize=True, database=None)
each_setting = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: ",".join(setting) or "neutral")


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def request_with(sampled: bool = True, **setting) -> Request:
    request = make_request(0, 1, 9)
    request.sampling = replace(request.sampling, do_sample=sampled, **setting)
    return request


def rows_of(requests: list[Request], *, history: list[int] = HISTORY, held: bool = False) -> Rows:
    """Rows as the running batch would hold them: streams and positions count up."""
    chosen = [request.sampling for request in requests]
    count = len(chosen)
    seen = torch.zeros(count, VOCAB, dtype=torch.bool)
    seen[:, history] = True
    width = max(len(one.stop_token_ids) for one in chosen)
    stops = [[*one.stop_token_ids, *[-1] * (width - len(one.stop_token_ids))] for one in chosen]
    return Rows(
        position=torch.arange(count) % 50,
        stream=torch.stack([torch.arange(count), torch.full((count,), 5)], dim=1),
        sampled=torch.tensor([one.do_sample for one in chosen]),
        temperature=torch.tensor([one.temperature for one in chosen]),
        top_k=torch.tensor([one.top_k for one in chosen]),
        tail=torch.tensor([1 - one.top_p for one in chosen]),
        min_p=torch.tensor([one.min_p for one in chosen]),
        penalty=torch.tensor([one.repetition_penalty for one in chosen]),
        seen=seen,
        stops=torch.tensor(stops, dtype=torch.int64).view(count, width),
        held=torch.full((count,), held),
    )


def variant_of(request: Request) -> Variant:
    return Variant.of([request.sampling])


def repeat(rows: Rows, count: int) -> Rows:
    """The same row with `count` streams."""
    fields = {name: value.expand(count, *value.shape[1:]) for name, value in vars(rows).items()}
    fields["stream"] = torch.stack([torch.arange(count), torch.full((count,), 5)], dim=1)
    return Rows(**fields)


def draw(logits: torch.Tensor, request: Request, count: int = DRAWS, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """Many draws of one row."""
    return sample(logits.expand(count, -1), repeat(rows_of([request], **kwargs), count), variant_of(request))


def counts(tokens: torch.Tensor) -> np.ndarray:
    return np.bincount(tokens.numpy(), minlength=VOCAB)


@each_setting
@pytest.mark.parametrize("seed", [0, 1])
def test_draws_follow_the_distribution_of_transformers(setting, seed):
    """Guards against filters in another order, a penalty after the temperature, or noise of another shape."""
    logits = logits_of(seed)
    tokens, _ = draw(logits, request_with(**setting))
    assert_drawn_from(warped_probs(logits[0], HISTORY, **setting).numpy(), counts(tokens))


@each_setting
def test_logprobs_are_those_of_the_distribution_drawn_from(setting):
    """Guards against log-probabilities before the penalty, the temperature or the filters."""
    logits = logits_of(2)
    tokens, logprobs = draw(logits, request_with(**setting), 200)
    expected = warped_probs(logits[0], HISTORY, **setting).log()
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected[tokens], rtol=0, atol=2e-6)


def test_mixed_rows_draw_what_each_draws_alone():
    """Guards against settings of one row that reach another, and a shortcut that changes what a row draws."""
    requests = [request_with(**setting) for setting in SETTINGS]
    requests += [request_with(sampled=False, repetition_penalty=1.4), request_with(stop_token_ids=(1, 2))]
    logits, rows = logits_of(3, len(requests)), rows_of(requests)
    tokens, logprobs = sample(logits, rows, Variant.FULL)
    for row, request in enumerate(requests):
        alone = Rows(**{name: value[row : row + 1] for name, value in vars(rows).items()})
        for variant in {variant_of(request), Variant.FULL}:
            token, logprob = sample(logits[row : row + 1], alone, variant)
            assert token.item() == tokens[row]
            torch.testing.assert_close(logprob, logprobs[row : row + 1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("variant", list(Variant))
def test_greedy_takes_the_most_likely_token(variant):
    """Guards against noise in a greedy row, another choice among equal tokens, and wrong log-probabilities."""
    logits = logits_of(4, 50).round()
    rows = rows_of([request_with(sampled=False)] * 50)
    tokens, logprobs = sample(logits, rows, variant)
    assert tokens.equal(logits.argmax(dim=1))
    expected = logits.log_softmax(dim=1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)


def test_greedy_log_probabilities_count_the_penalty():
    """Guards against a greedy row whose log-probability is not of the scores that it was chosen by."""
    logits = logits_of(5)
    request = request_with(sampled=False, repetition_penalty=1.8)
    (token,), (logprob,) = sample(logits, rows_of([request]), variant_of(request))
    probs = warped_probs(logits[0], HISTORY, repetition_penalty=1.8)
    assert token == probs.argmax()
    assert logprob.item() == pytest.approx(probs[token].log().item(), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "setting", [{"sampled": False}, {"temperature": 0.9}, {"top_p": 0.95, "repetition_penalty": 1.1}], ids=str
)
def test_logits_are_processed_in_fp32(dtype, setting):
    """Guards against log-probabilities and filters in the model's own precision."""
    logits, request = logits_of(6).to(dtype), request_with(**setting)
    tokens, logprobs = draw(logits, request, 100)
    wide_tokens, wide_logprobs = draw(logits.float(), request, 100)
    assert tokens.equal(wide_tokens)
    assert logprobs.dtype == torch.float32
    assert logprobs.equal(wide_logprobs)


def test_a_draw_depends_on_stream_and_position_alone():
    """Guards against draws that change with the row of the batch, or repeat at the next position."""
    request = request_with(temperature=1.5)
    rows, logits = rows_of([request] * 40), logits_of(7).expand(40, -1)
    tokens, _ = sample(logits, rows, Variant.PLAIN)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    shuffled = Rows(**{name: value[order] for name, value in vars(rows).items()})
    assert sample(logits, shuffled, Variant.PLAIN)[0].equal(tokens[order])
    moved = sample(logits, replace(rows, position=rows.position + 1), Variant.PLAIN)[0]
    assert (moved != tokens).float().mean() > 0.3


@pytest.mark.parametrize("stops", [(0, 5), (5,), (11, 0, 5)])
def test_held_rows_do_not_stop(stops):
    """Guards against a stop token before min_new_tokens, and a distribution other than that of transformers."""
    logits = logits_of(8)
    request = request_with(stop_token_ids=stops, min_new_tokens=3, temperature=1.3)
    tokens, logprobs = draw(logits, request, held=True)
    processor = MinNewTokensLengthLogitsProcessor(1, 3, list(stops), device="cpu")
    probs = (processor(torch.tensor([[1]]), logits.clone()) / 1.3).softmax(dim=-1)[0]
    assert_drawn_from(probs.numpy(), counts(tokens))
    torch.testing.assert_close(logprobs, probs.log()[tokens], rtol=0, atol=2e-6)
    free, _ = draw(logits, request, held=False)
    assert_drawn_from(warped_probs(logits[0], HISTORY, temperature=1.3).numpy(), counts(free))


def test_missing_stop_tokens_hold_nothing():
    """Guards against the filler of a shorter list of stop tokens, which may not stand for token 0."""
    scores = torch.zeros(2, 4)
    held = hold(scores, torch.tensor([[-1, -1], [0, 2]]), torch.tensor([True, True]))
    assert held.isinf().tolist() == [[False] * 4, [True, False, True, False]]
    assert hold(scores, torch.empty(2, 0, dtype=torch.int64), torch.tensor([True, True])).equal(scores)


NUMBERS = st.integers(-6, 6).map(float) | st.floats(-30, 30, width=32)
LISTS = st.lists(st.sampled_from([0.0, 1.0]) | NUMBERS, min_size=1, max_size=VOCAB)
EQUAL = st.integers(1, VOCAB).map(lambda count: [0.0] * count)
SHARES = st.integers(1, 20).map(lambda n: n / 20) | st.integers(1, 64).map(lambda n: n / 64) | st.floats(0.001, 1)


def same_scores(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """The same tokens left out, and of the others the same scores; -inf is no number to compare."""
    return ours.isneginf().equal(theirs.isneginf()) and ours.equal(theirs)


@settings(steady, max_examples=600)
@given(logits=LISTS | EQUAL, top_k=st.integers(0, VOCAB + 2), top_p=SHARES, min_p=st.just(0.0) | SHARES)
@example([0.0] * 4, 0, 0.5, 0.0)  # the sum reaches p exactly
@example([0.0] * 5, 0, 0.6, 0.0)  # 1 - p must be rounded once
@example([0.0] * 3, 0, 1e-9, 0.0)  # 1 - p rounds to 1
@example([1.0, 2.0, 2.0, 2.0, 3.0], 2, 1.0, 0.0)  # the k-th score is not alone
def test_kept_tokens_are_those_of_transformers(logits, top_k, top_p, min_p):
    """Guards against another choice at the edge of a filter, where tokens are equally likely above all."""
    scores = torch.tensor(logits)
    ours = keep_likely(scores[None], torch.tensor([top_k]), torch.tensor([1 - top_p]), torch.tensor([min_p]))[0]
    assert same_scores(ours, warped_scores(scores, [0], top_k=top_k, top_p=top_p, min_p=min_p))


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(50, 0.9, 0.0), (0, 0.95, 0.0), (0, 0.5, 0.1), (7, 1.0, 0.02)])
def test_kept_tokens_of_large_rounded_vocabularies(top_k, top_p, min_p):
    """Guards against an arbitrary choice among the many equal logits of a bf16 head.

    Over more than 16 tokens transformers' own sort does not keep equal tokens in order, so scores are compared.
    """
    scores = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1)).mul(2).bfloat16().float()
    limits = (torch.tensor([top_k]), torch.tensor([1 - top_p]), torch.tensor([min_p]))
    kept = keep_likely(scores, *(limit.expand(6) for limit in limits))
    for row in range(6):
        expected = warped_scores(scores[row], [0], top_k=top_k, top_p=top_p, min_p=min_p)
        assert kept[row].sort().values.equal(expected.sort().values)
        least = kept[row][kept[row].isfinite()].min()
        stays = kept[row][scores[row] == least].isfinite()
        assert stays.equal(stays.sort(stable=True).values), "the highest ids stay"


@settings(steady, max_examples=200)
@given(rows=st.lists(st.tuples(st.integers(0, VOCAB + 2), SHARES, st.just(0.0) | SHARES), min_size=2, max_size=5))
def test_filters_of_mixed_rows_keep_what_each_keeps(rows):
    """Guards against the filters of one row that reach another."""
    scores = logits_of(len(rows), len(rows))
    top_k, top_p, min_p = zip(*rows, strict=True)
    tail = torch.tensor([1 - p for p in top_p])
    kept = keep_likely(scores, torch.tensor(top_k), tail, torch.tensor(min_p))
    for row, (k, p, m) in enumerate(rows):
        assert same_scores(kept[row], warped_scores(scores[row], [0], top_k=k, top_p=p, min_p=m))


@settings(steady, max_examples=200)
@given(
    logits=st.lists(NUMBERS, min_size=VOCAB, max_size=VOCAB),
    history=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    penalty=st.floats(0.1, 10),
)
def test_penalty_is_that_of_transformers(logits, history, penalty):
    """Guards against a penalty that divides negative logits, or that counts a token twice."""
    scores = torch.tensor([logits])
    seen = torch.zeros(1, VOCAB, dtype=torch.bool)
    seen[0, history] = True
    ours = penalise(scores, seen, torch.tensor([penalty]))[0]
    torch.testing.assert_close(ours, warped_scores(scores[0], history, repetition_penalty=penalty))
    assert penalise(scores, None, torch.tensor([penalty])).equal(scores)


def test_nothing_is_left_out_at_neutral_settings():
    """Guards against a top-p of 1 that drops tokens whose probability rounds to 0."""
    scores = torch.tensor([[0.0, -200.0, -30.0]])
    assert keep_likely(scores, torch.tensor([0]), torch.tensor([0.0]), torch.tensor([0.0])).equal(scores)


@pytest.mark.parametrize("setting", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.99}])
def test_tokens_that_the_model_excludes_stay_excluded(setting):
    """Guards against NaN from a head that masks a part of its vocabulary with -inf."""
    logits = logits_of(9) / 4
    logits[0, 4:] = float("-inf")
    tokens, logprobs = draw(logits, request_with(**setting), 2000)
    assert tokens.max() < 4
    assert logprobs.isfinite().all()
    assert_drawn_from(warped_probs(logits[0], HISTORY, **setting).numpy(), counts(tokens))


@pytest.mark.parametrize(
    ("setting", "variant"),
    [
        ({"sampled": False}, Variant.GREEDY),
        ({"sampled": False, "top_k": 5, "top_p": 0.5, "min_p": 0.5}, Variant.GREEDY),
        ({"sampled": False, "repetition_penalty": 1.1}, Variant.FULL),
        ({"temperature": 0.5}, Variant.PLAIN),
        ({"min_new_tokens": 2}, Variant.PLAIN),
        ({"stop_token_ids": (3,)}, Variant.PLAIN),
        ({"min_new_tokens": 2, "stop_token_ids": (3,)}, Variant.FULL),
        ({"top_k": 5}, Variant.FULL),
        ({"top_p": 0.5}, Variant.FULL),
        ({"min_p": 0.5}, Variant.FULL),
        ({"repetition_penalty": 0.9}, Variant.FULL),
    ],
)
def test_the_least_variant_that_serves(setting, variant):
    """Guards against a setting that is silently skipped, and a sort in every step of a call that needs none."""
    chosen = request_with(**setting).sampling
    greedy = request_with(sampled=False).sampling
    assert Variant.of([chosen]) is variant
    assert Variant.of([greedy, chosen, greedy]) is variant
