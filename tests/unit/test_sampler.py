"""Tokens are drawn from transformers' distribution, and their log-probabilities are those of that distribution."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from frequencies import assert_drawn_from
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plain_sampler import plain_kept, plain_logprobs, plain_scores
from sampled_rows import admitted, repeated, request_with
from transformers import MinNewTokensLengthLogitsProcessor
from warpers import warped_probs, warped_scores

from liveroll.decode.sampler import Variant, add_bias, penalise, sample
from liveroll.decode.state import IN_PROMPT, IN_RESPONSE
from liveroll.scheduling.details import Wanted
from liveroll.scheduling.request import Request

VOCAB = 12
DRAWS = 20_000
PROMPT, RESPONSE = [0, 3, 3, 7], [5, 5, 3]
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
OURS: list[dict[str, Any]] = [
    {"presence_penalty": 1.2},
    {"frequency_penalty": 0.9},
    {"presence_penalty": -1.0, "frequency_penalty": -0.4, "temperature": 1.5},
    {"logit_bias": ((1, 2.0), (5, -1.5), (11, 0.5))},
    {"forbidden_tokens": (0, 5, 9)},
    {"first_forbidden_tokens": (1, 2)},
    {
        "temperature": 1.5,
        "top_k": 8,
        "top_p": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": ((2, 1.0), (4, -1.0)),
        "forbidden_tokens": (4, 6),
    },
]

steady = settings(deadline=None, derandomize=True, database=None)
names = {"ids": lambda setting: ",".join(setting) or "neutral"}
each_setting = pytest.mark.parametrize("setting", SETTINGS, **names)
each_of_ours = pytest.mark.parametrize("setting", OURS, **names)


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def variant_of(request: Request) -> Variant:
    return Variant.of([request.sampling])


def draw(logits: torch.Tensor, request: Request, count: int = DRAWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Many draws of one row."""
    state, slots = repeated(request, count, VOCAB)
    drawn = sample(logits.expand(count, -1), state, slots, variant_of(request))
    return drawn.tokens, drawn.logprobs


def counts(tokens: torch.Tensor) -> np.ndarray:
    return np.bincount(tokens.numpy(), minlength=VOCAB)


def plain(logits: torch.Tensor, request: Request) -> list[float]:
    """The log-probabilities of all tokens by the plain sampler."""
    scores = plain_scores(logits.tolist(), request.prompt.tolist(), request.tokens.tolist(), request.sampling)
    return plain_logprobs(scores, plain_kept(scores, request.sampling)[0])


@each_setting
@pytest.mark.parametrize("seed", [0, 1])
def test_draws_follow_the_distribution_of_transformers(setting, seed):
    """Guards against filters in another order, a penalty after the temperature, or noise of another shape."""
    logits = logits_of(seed)
    tokens, _ = draw(logits, request_with(PROMPT, RESPONSE, **setting))
    assert_drawn_from(warped_probs(logits[0], PROMPT + RESPONSE, **setting).numpy(), counts(tokens))


@each_setting
def test_logprobs_are_those_of_the_distribution_drawn_from(setting):
    """Guards against log-probabilities before the penalty, the temperature or the filters."""
    logits = logits_of(2)
    tokens, logprobs = draw(logits, request_with(PROMPT, RESPONSE, **setting), 200)
    expected = warped_probs(logits[0], PROMPT + RESPONSE, **setting).log()
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected[tokens], rtol=0, atol=2e-6)


@each_of_ours
@pytest.mark.parametrize("response", [[], RESPONSE], ids=["first", "later"])
def test_draws_follow_the_plain_distribution(setting, response):
    """Guards against counts of the prompt, exclusions that leak, and biases after the penalties."""
    logits, request = logits_of(3), request_with(PROMPT, response, **setting)
    tokens, logprobs = draw(logits, request)
    expected = torch.tensor(plain(logits[0], request))
    assert_drawn_from(expected.exp().numpy(), counts(tokens))
    torch.testing.assert_close(logprobs, expected[tokens], rtol=0, atol=2e-6)


EIGHTHS = st.integers(-24, 24).map(lambda n: n / 8)
TOKENS = st.integers(0, VOCAB - 1)
MIXES = st.fixed_dictionaries(
    {"sampled": st.booleans()},
    optional={
        "temperature": st.sampled_from([0.5, 1.0, 2.0]),
        "top_k": st.integers(0, VOCAB + 1),
        "top_p": st.floats(0.05, 1),
        "min_p": st.floats(0, 0.9),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0]),
        "presence_penalty": EIGHTHS,
        "frequency_penalty": EIGHTHS,
        "logit_bias": st.dictionaries(TOKENS, EIGHTHS, max_size=3).map(lambda biases: tuple(biases.items())),
        "forbidden_tokens": st.lists(TOKENS, max_size=3).map(tuple),
        "first_forbidden_tokens": st.lists(TOKENS, max_size=3).map(tuple),
        "stop_token_ids": st.lists(TOKENS, max_size=2, unique=True).map(tuple),
        "min_new_tokens": st.integers(0, 3),
        "prompt": st.lists(TOKENS, min_size=1, max_size=5),
        "response": st.lists(TOKENS, max_size=4),
    },
)


@settings(steady, max_examples=250)
@given(
    mixes=st.lists(MIXES, min_size=1, max_size=4),
    logits=st.lists(st.lists(EIGHTHS, min_size=VOCAB, max_size=VOCAB), min_size=4, max_size=4),
    size=st.sampled_from([VOCAB, VOCAB - 1]),
)
def test_any_mix_of_settings(mixes, logits, size):
    """Guards against settings that hinder one another, or reach another row, wherever ties and edges lie.

    All numbers are exact in binary, so the plain sampler in double precision finds the very ties.
    """
    requests = [request_with(**mix) for mix in mixes]
    rows = torch.tensor(logits[: len(mixes)])
    state, slots = admitted(requests, VOCAB, size)
    wanted = Wanted(raw=True, top=4, kept=16)
    drawn = sample(rows, state, slots, Variant.FULL, wanted)
    details = wanted.read(drawn.details.numpy())
    for row, request in enumerate(requests):
        scores = plain_scores(logits[row], request.prompt.tolist(), request.tokens.tolist(), request.sampling, size)
        kept, margin = plain_kept(scores, request.sampling)
        assume(margin > 1e-5)
        expected = plain_logprobs(scores, kept)
        token = int(drawn.tokens[row])
        assert set(details.kept[row].tolist()) == kept
        assert details.kept[row].tolist() == sorted(kept)
        assert drawn.logprobs[row].item() == pytest.approx(expected[token], abs=1e-5)
        raw = rows[row].double().log_softmax(0)[token].item()
        assert details.raw_logprobs[row] == pytest.approx(raw, abs=1e-5)
        best = sorted(kept, key=lambda token: (-expected[token], token))[:4]
        assert details.top_ids[row].tolist()[: len(best)] == best
        filler = [-math.inf] * (4 - len(best))
        assert details.top_logprobs[row].tolist() == pytest.approx([expected[t] for t in best] + filler, abs=1e-5)
        if not request.sampling.do_sample:
            assert token == scores.index(max(scores))


def test_mixed_rows_draw_what_each_draws_alone():
    """Guards against settings of one row that reach another, and a shortcut that changes what a row draws."""
    settings_of_rows = [*SETTINGS, *OURS, {"stop_token_ids": (1, 2)}, {"sampled": False, "repetition_penalty": 1.4}]
    requests = [request_with(PROMPT, RESPONSE, **setting) for setting in settings_of_rows]
    logits = logits_of(3, len(requests))
    state, slots = admitted(requests, VOCAB)
    together = sample(logits, state, slots, Variant.FULL)
    for row, request in enumerate(requests):
        for variant in {variant_of(request), Variant.FULL}:
            alone = sample(logits[row : row + 1], state, slots[row : row + 1], variant)
            assert alone.tokens.item() == together.tokens[row]
            torch.testing.assert_close(alone.logprobs, together.logprobs[row : row + 1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("variant", list(Variant))
def test_greedy_takes_the_most_likely_token(variant):
    """Guards against noise in a greedy row, another choice among equal tokens, and wrong log-probabilities."""
    logits = logits_of(4, 50).round()
    state, slots = repeated(request_with(sampled=False), 50, VOCAB)
    drawn = sample(logits, state, slots, variant)
    assert drawn.tokens.equal(logits.argmax(dim=1))
    expected = logits.log_softmax(dim=1).gather(1, drawn.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs, expected, rtol=0, atol=1e-6)


def test_greedy_log_probabilities_count_the_penalty():
    """Guards against a greedy row whose log-probability is not of the scores that it was chosen by."""
    logits = logits_of(5)
    (token,), (logprob,) = draw(logits, request_with(PROMPT, sampled=False, repetition_penalty=1.8), 1)
    probs = warped_probs(logits[0], PROMPT, repetition_penalty=1.8)
    assert token == probs.argmax()
    assert logprob.item() == pytest.approx(probs[token].log().item(), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "setting", [{"sampled": False}, {"temperature": 0.9}, {"top_p": 0.95, "repetition_penalty": 1.1}], ids=str
)
def test_logits_are_processed_in_fp32(dtype, setting):
    """Guards against log-probabilities and filters in the model's own precision."""
    logits, request = logits_of(6).to(dtype), request_with(PROMPT, **setting)
    tokens, logprobs = draw(logits, request, 100)
    wide_tokens, wide_logprobs = draw(logits.float(), request, 100)
    assert tokens.equal(wide_tokens)
    assert logprobs.dtype == torch.float32
    assert logprobs.equal(wide_logprobs)


def test_a_draw_depends_on_stream_and_position_alone():
    """Guards against draws that change with the row of the batch, or repeat at the next position."""
    state, slots = repeated(request_with(temperature=1.5), 40, VOCAB)
    logits = logits_of(7).expand(40, -1)
    tokens = sample(logits, state, slots, Variant.PLAIN).tokens
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert sample(logits, state, slots[order], Variant.PLAIN).tokens.equal(tokens[order])
    later, _ = repeated(request_with((0, 3, 3, 7, 1), temperature=1.5), 40, VOCAB)
    moved = sample(logits, later, slots, Variant.PLAIN).tokens
    assert (moved != tokens).float().mean() > 0.3


@pytest.mark.parametrize("stops", [(0, 5), (5,), (11, 0, 5)])
def test_held_rows_do_not_stop(stops):
    """Guards against a stop token before min_new_tokens, and a distribution other than that of transformers."""
    logits, setting = logits_of(8), {"stop_token_ids": stops, "min_new_tokens": 3, "temperature": 1.3}
    tokens, logprobs = draw(logits, request_with(PROMPT, RESPONSE[:2], **setting))
    processor = MinNewTokensLengthLogitsProcessor(1, 3, list(stops), device="cpu")
    probs = (processor(torch.tensor([[1]]), logits.clone()) / 1.3).softmax(dim=-1)[0]
    assert_drawn_from(probs.numpy(), counts(tokens))
    torch.testing.assert_close(logprobs, probs.log()[tokens], rtol=0, atol=2e-6)
    free, _ = draw(logits, request_with(PROMPT, RESPONSE, **setting))
    assert_drawn_from(warped_probs(logits[0], PROMPT, temperature=1.3).numpy(), counts(free))


def test_ids_without_a_token_are_not_drawn():
    """Guards against padded rows of an embedding that are sampled, ranked, or counted by the sampled distribution."""
    logits = logits_of(9)
    logits[0, VOCAB - 2 :] += 5
    for setting in ({}, {"sampled": False}, {"top_k": 3}, {"forbidden_tokens": (1, VOCAB - 1)}):
        request = request_with(**setting)
        state, slots = repeated(request, 500, VOCAB, sampled_size=VOCAB - 2)
        wanted = Wanted(raw=True, top=2)
        drawn = sample(logits.expand(500, -1), state, slots, variant_of(request), wanted)
        details = wanted.read(drawn.details.numpy())
        assert drawn.tokens.max() < VOCAB - 2
        assert details.top_ids.max() < VOCAB - 2
        # What the model itself says is of all that it has a logit for.
        raw = logits[0].log_softmax(0)[drawn.tokens]
        torch.testing.assert_close(torch.from_numpy(details.raw_logprobs), raw, rtol=0, atol=2e-6)
        scores = plain_scores(logits[0].tolist(), [0], [], request.sampling, VOCAB - 2)
        expected = torch.tensor(plain_logprobs(scores, plain_kept(scores, request.sampling)[0]))
        torch.testing.assert_close(drawn.logprobs, expected[drawn.tokens], rtol=0, atol=2e-6)


def test_adjusted_tokens():
    """Guards against the filler of a shorter list, and ids behind those that may be sampled, reaching another token."""
    scores = torch.zeros(2, 4)
    tokens = torch.tensor([[1, 2**31 - 1, 2**31 - 1], [0, 3, 4]], dtype=torch.int32)
    bias = torch.tensor([[1.5, 0.0, 0.0], [-2.0, 0.0, 9.0]])
    excluded = torch.tensor([[False, False, False], [False, True, True]])
    found = add_bias(scores, tokens, bias, excluded)
    assert found.tolist() == [[0.0, 1.5, 0.0, 0.0], [-2.0, 0.0, 0.0, -math.inf]]
    assert not scores.any()


@settings(steady, max_examples=200)
@given(
    logits=st.lists(st.integers(-6, 6).map(float) | st.floats(-30, 30, width=32), min_size=VOCAB, max_size=VOCAB),
    history=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    penalty=st.floats(0.1, 10),
    share=st.integers(0, 6),
)
def test_repetition_penalty_is_that_of_transformers(logits, history, penalty, share):
    """Guards against a penalty that divides negative logits, or that counts a token twice."""
    scores = torch.tensor([logits])
    seen = torch.zeros(1, VOCAB, dtype=torch.int32)
    seen[0, history[:share]] = IN_PROMPT
    for token in history[share:]:
        seen[0, token] += IN_RESPONSE
    none = torch.zeros(1)
    ours = penalise(scores, seen, torch.tensor([penalty]), none, none)[0]
    torch.testing.assert_close(ours, warped_scores(scores[0], history, repetition_penalty=penalty))


@pytest.mark.parametrize("setting", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.99}])
def test_tokens_that_the_model_excludes_stay_excluded(setting):
    """Guards against NaN from a head that masks a part of its vocabulary with -inf."""
    logits = logits_of(9) / 4
    logits[0, 4:] = float("-inf")
    tokens, logprobs = draw(logits, request_with(**setting), 2000)
    assert tokens.max() < 4
    assert logprobs.isfinite().all()
    assert_drawn_from(warped_probs(logits[0], PROMPT, **setting).numpy(), counts(tokens))


@pytest.mark.parametrize("setting", [{}, {"sampled": False}, {"top_k": 3}, {"top_p": 0.5}, {"presence_penalty": 1.0}])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
def test_logits_that_are_not_numbers_show(setting, value):
    """Guards against a filter that hides the token which is no number, so that nonsense is sampled."""
    logits = logits_of(10)
    logits[0, 6] = value
    assert draw(logits, request_with(**setting), 5)[1].isnan().all()


@pytest.mark.parametrize(
    ("setting", "variant"),
    [
        ({"sampled": False}, Variant.GREEDY),
        ({"sampled": False, "top_k": 5, "top_p": 0.5, "min_p": 0.5}, Variant.GREEDY),
        ({"sampled": False, "repetition_penalty": 1.1}, Variant.FULL),
        ({"temperature": 0.5}, Variant.PLAIN),
        ({"min_new_tokens": 2}, Variant.PLAIN),
        ({"stop_token_ids": (3,)}, Variant.PLAIN),
        ({"raw_logprobs": True, "top_logprobs": 3, "kept_tokens": 3}, Variant.PLAIN),
        ({"min_new_tokens": 2, "stop_token_ids": (3,)}, Variant.FULL),
        ({"top_k": 5}, Variant.FULL),
        ({"top_p": 0.5}, Variant.FULL),
        ({"min_p": 0.5}, Variant.FULL),
        ({"repetition_penalty": 0.9}, Variant.FULL),
        ({"presence_penalty": 0.1}, Variant.FULL),
        ({"frequency_penalty": -0.1}, Variant.FULL),
        ({"logit_bias": ((1, 0.5),)}, Variant.FULL),
        ({"forbidden_tokens": (1,)}, Variant.FULL),
        ({"first_forbidden_tokens": (1,)}, Variant.FULL),
    ],
)
def test_the_least_variant_that_serves(setting, variant):
    """Guards against a setting that is silently skipped, and a search in every step of a call that needs none."""
    chosen = request_with(**setting).sampling
    greedy = request_with(sampled=False).sampling
    assert Variant.of([chosen]) is variant
    assert Variant.of([greedy, chosen, greedy]) is variant


def test_what_is_wanted_serves_every_prompt():
    """Guards against details of one prompt left out for another's sake, and widths that capture ever new steps."""
    asked = [{}, {"raw_logprobs": True}, {"top_logprobs": 5}, {"top_logprobs": 3, "kept_tokens": 9, "top_k": 4}]
    samplings = [request_with(**setting).sampling for setting in asked]
    assert Wanted.of(samplings) == Wanted(raw=True, top=8, kept=16)
    assert Wanted.of(samplings[:1]) == Wanted()
    # Nothing is truncated, so there is nothing to keep.
    assert Wanted.of([replace(samplings[0], kept_tokens=7)]) == Wanted()
