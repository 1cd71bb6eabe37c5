"""Streams depend on seed, prompt and sample, and on nothing else of a call."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveroll.streams import assign_streams, call_seed

steady = settings(deadline=None, derandomize=True, database=None)
PROMPTS = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(lambda ids: np.array(ids, np.int64))
ENTRIES = st.lists(st.tuples(PROMPTS, st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=6)


def assign(entries):
    prompts, counts, seeds = zip(*entries, strict=True)
    return assign_streams(prompts, counts, seeds)


def streams_by_prompt(entries):
    """All streams that a prompt and seed get in a call."""
    found = {}
    for (prompt, _, seed), keys in zip(entries, assign(entries), strict=True):
        found.setdefault((seed, *prompt.tolist()), []).extend(keys)
    return found


@steady
@given(ENTRIES, st.randoms(use_true_random=False))
def test_order_does_not_matter(entries, random):
    """Guards against samples that change when the prompts of a call are shuffled."""
    shuffled = list(entries)
    random.shuffle(shuffled)
    assert streams_by_prompt(entries) == streams_by_prompt(shuffled)


@steady
@given(ENTRIES)
def test_company_does_not_matter(entries):
    """Guards against samples that change with the other prompts of a call."""
    for key, keys in streams_by_prompt(entries).items():
        seed, *ids = key
        assert assign([(np.array(ids), len(keys), seed)]) == [keys]


@steady
@given(ENTRIES)
def test_streams_differ(entries):
    """Guards against equal samples of one prompt, and of prompts or seeds that only look alike."""
    keys = [key for keys in assign(entries) for key in keys]
    assert len(set(keys)) == len(keys) == sum(count for _, count, _ in entries)


def test_samples_are_copies():
    """Guards against a group of eight that depends on whether it was given as n=8 or as eight prompts."""
    prompt = np.array([5, 6], np.int64)
    (together,) = assign([(prompt, 8, 3)])
    apart = assign([(prompt, 1, 3)] * 8)
    halves = assign([(prompt, 4, 3)] * 2)
    assert together == [key for keys in apart for key in keys] == [key for keys in halves for key in keys]


def test_more_samples_keep_the_first():
    """Guards against samples that change when more of them are asked for."""
    prompt = np.array([5, 6], np.int64)
    assert assign([(prompt, 8, 3)])[0][:3] == assign([(prompt, 3, 3)])[0]


@pytest.mark.parametrize("dtype", [np.int64, np.int32, ">i8"])
def test_token_ids_count_not_their_dtype(dtype):
    """Guards against samples that depend on the integer type or byte order that the ids came in."""
    ids = [5, 6, 70_000]
    assert assign([(np.array(ids, dtype), 2, 0)]) == assign([(np.array(ids, np.int64), 2, 0)])


def test_keys_are_32_bit_words_that_fill_their_range():
    """Guards against keys that do not fit the words the noise is made of, or that use part of them only."""
    keys = np.array(assign([(np.array([1]), 4000, 0)])[0])
    assert keys.min() >= -(2**31)
    assert keys.max() < 2**31
    bits = (keys[..., None] >> np.arange(32)) & 1
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.05


def test_streams_stay_the_same_between_releases():
    """Guards against seeds that give other samples after an update."""
    assert assign([(np.array([1, 2, 3]), 2, 7)]) == [[(-1585983169, -692564943), (1862858978, 1744297351)]]


def test_call_seeds():
    """Guards against calls without a seed that repeat one another, or that cannot be repeated."""
    seeds = {(engine, call): call_seed(engine, call) for engine in range(20) for call in range(20)}
    assert len(set(seeds.values())) == 400
    assert all(0 <= seed < 2**64 for seed in seeds.values())
    assert call_seed(3, 4) == seeds[3, 4]
