"""What top-k, top-p and min-p keep: transformers' choice, and the same one whatever the order of addition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from warpers import warped_scores

from liveroll.decode.truncation import find_bounds, keep_likely, keeps, masses

VOCAB = 12
NEVER = -math.inf

steady = settings(deadline=None, derandomize=True, database=None)

NUMBERS = st.integers(-6, 6).map(float) | st.floats(-30, 30, width=32)
LISTS = st.lists(st.sampled_from([0.0, 1.0]) | NUMBERS, min_size=1, max_size=VOCAB)
EQUAL = st.integers(1, VOCAB).map(lambda count: [0.0] * count)
SHARES = st.integers(1, 20).map(lambda n: n / 20) | st.integers(1, 64).map(lambda n: n / 64) | st.floats(0.001, 1)


def limits(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, rows: int = 1) -> tuple[torch.Tensor, ...]:
    """The limits of `find_bounds` for rows of one setting, as the running batch holds them."""
    least = math.log(min_p) if min_p else NEVER
    return (torch.tensor([top_k] * rows), torch.tensor([1 - top_p] * rows), torch.tensor([least] * rows))


def same_scores(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """The same tokens left out, and of the others the same scores; -inf is no number to compare."""
    return ours.isneginf().equal(theirs.isneginf()) and ours.equal(theirs)


def decided_by_rounding(logits: list[float], top_k: int, top_p: float) -> bool:
    """Whether the mass of some likely tokens is p but for rounding, so that two sums may differ in the last token."""
    scores = torch.tensor(logits)
    ranked = warped_scores(scores, [0], top_k=top_k).double().softmax(0).sort(descending=True).values
    return bool(((ranked.cumsum(0) - top_p).abs() < 1e-5).any())


@settings(steady, max_examples=400)
@given(logits=LISTS | EQUAL, top_k=st.integers(0, VOCAB + 2), top_p=SHARES, min_p=st.just(0.0) | SHARES)
@example([0.0] * 3, 0, 1e-9, 0.0)  # 1 - p rounds to 1
@example([1.0, 2.0, 2.0, 2.0, 3.0], 2, 1.0, 0.0)  # the k-th score is not alone
@example([0.0, 0.0, 0.0, -1.0], 0, 0.5, 0.0)  # the edge of top-p lies among equal tokens
@example([0.0, -0.0, 0.0, -0.0], 0, 0.6, 0.0)  # the two zeros are equal
def test_kept_tokens_are_those_of_transformers(logits, top_k, top_p, min_p):
    """Guards against another choice at the edge of a filter, where tokens are equally likely above all."""
    assume(top_p == 1 or not decided_by_rounding(logits, top_k, top_p))
    scores = torch.tensor(logits)
    ours = keep_likely(scores[None], *limits(top_k, top_p, min_p))[0]
    assert same_scores(ours, warped_scores(scores, [0], top_k=top_k, top_p=top_p, min_p=min_p))


@pytest.mark.parametrize(
    ("equal", "top_p", "kept"),
    [(4, 0.5, 2), (4, 0.51, 3), (5, 0.6, 3), (8, 0.875, 7), (10, 0.5, 5), (10, 0.7, 7), (64, 1 / 64, 1), (3, 1e-9, 1)],
)
def test_equal_tokens_reach_p_exactly(equal, top_p, kept):
    """Guards against sums that miss p by rounding: of equal tokens just as many stay as p asks for."""
    scores = torch.full((1, equal), 3.7)
    stays = keeps(scores, *find_bounds(scores, *limits(top_p=top_p)))[0].tolist()
    assert stays == [False] * (equal - kept) + [True] * kept


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(50, 0.9, 0.0), (0, 0.95, 0.0), (0, 0.5, 0.1), (7, 1.0, 0.02)])
def test_kept_tokens_of_large_rounded_vocabularies(top_k, top_p, min_p):
    """Guards against an arbitrary choice among the many equal logits of a bf16 head.

    Over more than 16 tokens transformers' own sort does not keep equal tokens in order, so scores are compared.
    """
    scores = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1)).mul(2).bfloat16().float()
    kept = keep_likely(scores, *limits(top_k, top_p, min_p, rows=6))
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
    scores = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(len(rows))) * 2
    mixed = (torch.cat(column) for column in zip(*(limits(*row) for row in rows), strict=True))
    kept = keep_likely(scores, *mixed)
    for row, setting in enumerate(rows):
        assert kept[row].equal(keep_likely(scores[row : row + 1], *limits(*setting))[0])


@pytest.mark.parametrize("top_k", [0, 700])
def test_sums_are_of_whole_numbers(top_k):
    """Guards against sums in floating point, whose last digit depends on what is added up first, and so on the device.

    The scores are such that a single unit of mass more or less moves the edge of top-p.
    """
    scores = torch.cat([torch.tensor([3.0]), torch.linspace(-7.0, 2.0, 5000)])
    amounts = masses(scores[None], scores.max().view(1, 1))[0].tolist()
    order = sorted(range(len(scores)), key=lambda token: (-scores[token].item(), -token))
    order = order[: top_k or None]
    total = sum(amounts[token] for token in order)
    for rank in range(50, len(order), 60):
        tail = torch.tensor(sum(amounts[token] for token in order[rank:]) / total, dtype=torch.float32)
        beyond = int(tail.double().item() * total)
        expected, left = set(order), 0
        for token in reversed(order):
            left += amounts[token]
            if left > beyond:
                break
            expected.discard(token)
        bound = find_bounds(scores[None], torch.tensor([top_k]), tail.view(1), torch.tensor([NEVER]))
        assert set(keeps(scores[None], *bound)[0].nonzero()[:, 0].tolist()) == expected


def test_masses_are_exponentials():
    """Guards against a series that is off: relative to the exponential by no more than float32 is, and monotone."""
    scores = torch.cat([torch.linspace(-27, 0, 200_000), torch.tensor([-70.0, NEVER])])[None]
    found = masses(scores, torch.zeros(1, 1))[0]
    expected = scores[0, :-2].double().exp() * 2.0**40
    error = (found[:-2].double() - expected).abs()
    assert (error <= expected * 3e-6 + 1).all()
    assert (error[-10_000:] / expected[-10_000:]).max() < 2e-7
    assert (found[:-2].diff() >= 0).all()
    assert found[-2:].tolist() == [0, 0]


def test_nothing_is_left_out_at_neutral_settings():
    """Guards against a top-p of 1 that drops tokens whose probability rounds to 0."""
    scores = torch.tensor([[0.0, -200.0, -30.0, NEVER]])
    assert keep_likely(scores, *limits()).equal(scores)


def test_more_than_there_are_is_all():
    """Guards against a k beyond the vocabulary, or beyond what is not excluded."""
    scores = torch.tensor([[0.0, 1.0, NEVER, 2.0]])
    for top_k in (3, 4, 5, 2**31 - 1):
        assert keep_likely(scores, *limits(top_k=top_k)).equal(scores)


def test_what_is_no_number_stays():
    """Guards against NaN that filters hide: a row with one must show it."""
    for sign in (1, -1):
        scores = torch.tensor([[1.0, 2.0, sign * math.nan, 3.0]])
        for setting in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}, {"top_k": 2, "top_p": 0.5}):
            assert keep_likely(scores, *limits(**setting))[0].isnan().tolist() == [False, False, True, False]
