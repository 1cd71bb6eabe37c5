"""The bucket programme finds the cheapest split of prompts into padded forwards, and says what it costs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveroll import ConfigError, CostModel, LiverollError, ModelGeometry, PrefillLimitError, PromptError, plan_buckets

# Qwen2.5-3B in bf16.
GEOMETRY = ModelGeometry(layers=36, query_heads=16, kv_heads=2, head_dim=128, element_bytes=2)
WORKLOADS = {
    "short": [20, 19, 18, 17, 16, 15, 14, 13] * 4,
    "long tail": [512] + [16] * 31,
    "short tail": [20] + [1] * 31,
    "moderate": [128] + [4] * 31,
    "spread": list(range(16, 513, 16)),
    "many": [16] * 128,
}

steady = settings(deadline=None, derandomize=True, database=None, max_examples=200)
coefficients = st.sampled_from([0.0, 1e-4, 0.01, 0.1, 1.0, 25.0, 400.0])
cost_models = st.builds(
    CostModel,
    fixed_ms=coefficients,
    token_ms=coefficients,
    attention_ms_per_gflop=coefficients,
    kv_ms_per_mib=coefficients,
    max_tokens=st.none() | st.integers(1, 200),
)


def bucket_ms(count, width, costs, geometry=GEOMETRY):
    """The formula, written out."""
    gflops = 4 * count * width**2 * geometry.layers * geometry.query_heads * geometry.head_dim / 1e9
    mib = 2 * count * width * geometry.layers * geometry.kv_heads * geometry.head_dim * geometry.element_bytes / 2**20
    return (
        costs.fixed_ms
        + costs.token_ms * count * width
        + costs.attention_ms_per_gflop * gflops
        + costs.kv_ms_per_mib * mib
    )


def runs(count):
    """Every way to cut `count` prompts in order into runs, as lists of their lengths."""
    if count == 0:
        yield []
    for first in range(1, count + 1):
        yield from ([first, *rest] for rest in runs(count - first))


def splits(items):
    """Every way to split items into groups, in order or not."""
    if not items:
        yield []
        return
    for rest in splits(items[1:]):
        yield [[items[0]], *rest]
        for index, group in enumerate(rest):
            yield [*rest[:index], [items[0], *group], *rest[index + 1 :]]


def price(groups, costs):
    """What groups of lengths cost, or infinity where one is over the limit."""
    over = any(costs.max_tokens is not None and len(group) * max(group) > costs.max_tokens for group in groups)
    return float("inf") if over else sum(bucket_ms(len(group), max(group), costs) for group in groups)


def cheapest_runs(lengths, costs):
    """The least cost over all cuts of the sorted lengths into runs, every one of them tried."""
    ordered = sorted(lengths)
    prices = []
    for cut in runs(len(ordered)):
        ends = np.cumsum(cut).tolist()
        prices.append(price([ordered[end - size : end] for end, size in zip(ends, cut, strict=True)], costs))
    return min(prices)


def cheapest_by_table(lengths, costs):
    """The same by a plain table over the ends of runs, for more prompts than can be cut in every way."""
    ordered = sorted(lengths)
    best = [0.0]
    for end in range(1, len(ordered) + 1):
        best.append(min(best[start] + price([ordered[start:end]], costs) for start in range(end)))
    return best[-1]


def assert_plan(buckets, lengths, costs):
    """Every prompt once, widths that hold, costs by the formula, all within the limit."""
    assert sorted(index for bucket in buckets for index in bucket.indices) == list(range(len(lengths)))
    for bucket in buckets:
        assert list(bucket.indices) == sorted(bucket.indices)
        assert bucket.width == max(lengths[index] for index in bucket.indices)
        assert costs.max_tokens is None or len(bucket.indices) * bucket.width <= costs.max_tokens
        assert bucket.cost_ms == pytest.approx(bucket_ms(len(bucket.indices), bucket.width, costs))
    for narrow, wide in pairwise(buckets):
        assert max(lengths[i] for i in narrow.indices) <= min(lengths[i] for i in wide.indices)


def total(buckets):
    return sum(bucket.cost_ms for bucket in buckets)


@steady
@given(lengths=st.lists(st.integers(1, 60), max_size=9), costs=cost_models)
def test_no_cut_into_runs_is_cheaper(lengths, costs):
    """Guards against a split that is good and not the best, with a limit or without one."""
    if costs.max_tokens is not None and lengths and max(lengths) > costs.max_tokens:
        with pytest.raises(PrefillLimitError):
            plan_buckets(lengths, costs, GEOMETRY)
        return
    buckets = plan_buckets(lengths, costs, GEOMETRY)
    assert_plan(buckets, lengths, costs)
    assert total(buckets) == pytest.approx(cheapest_runs(lengths, costs), rel=1e-9, abs=1e-12)


@steady
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6), costs=cost_models)
def test_no_other_split_is_cheaper_either(lengths, costs):
    """Guards against a cost for which the order of length is the wrong one to cut."""
    if costs.max_tokens is None or max(lengths) <= costs.max_tokens:
        best = min(price(groups, costs) for groups in splits(lengths))
        assert total(plan_buckets(lengths, costs, GEOMETRY)) == pytest.approx(best, rel=1e-9, abs=1e-12)


@settings(steady, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 2000), min_size=30, max_size=80),
    costs=cost_models,
    room=st.sampled_from([1.0, 1.5, 2.0, 5.0, 30.0]),
)
def test_many_prompts_under_a_limit(lengths, costs, room):
    """Guards against a queue that loses the best start once the limit forbids the one before it."""
    limited = CostModel(**{**vars(costs), "max_tokens": int(max(lengths) * room)})
    buckets = plan_buckets(lengths, limited, GEOMETRY)
    assert_plan(buckets, lengths, limited)
    assert total(buckets) == pytest.approx(cheapest_by_table(lengths, limited), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("workload", "counts"),
    [("short", [32]), ("long tail", [31, 1]), ("short tail", [31, 1]), ("moderate", [31, 1]), ("many", [128])],
)
def test_the_workloads_with_the_defaults(workload, counts):
    """Guards against defaults that pad short prompts to a long one, or launch a forward for each."""
    buckets = plan_buckets(WORKLOADS[workload], CostModel(), GEOMETRY)
    assert [len(bucket.indices) for bucket in buckets] == counts


def test_a_spread_of_lengths_takes_six_buckets():
    """Guards against another trade of padding for forwards than the one that was measured to be good."""
    buckets = plan_buckets(WORKLOADS["spread"], CostModel(), GEOMETRY)
    assert len(buckets) == 6
    assert total(buckets) == pytest.approx(cheapest_by_table(WORKLOADS["spread"], CostModel()))


def test_costs_by_hand():
    """Guards against a term that is lost or doubled: 31 prompts of 16 tokens and one of 512."""
    narrow, wide = plan_buckets(WORKLOADS["long tail"], CostModel(), GEOMETRY)
    assert narrow.indices == tuple(range(1, 32))
    assert (narrow.width, wide.width, wide.indices) == (16, 512, (0,))
    # 496 tokens, 0.00234 TFLOP and 17.4375 MiB; 512 tokens, 0.0773 TFLOP and 18 MiB.
    assert narrow.cost_ms == pytest.approx(25 + 49.6 + 0.01 * 2.340421632 + 0.04 * 17.4375)
    assert wide.cost_ms == pytest.approx(25 + 51.2 + 0.01 * 77.309411328 + 0.04 * 18)


def test_forwards_that_cost_nothing_are_not_multiplied():
    """Guards against more forwards than needed where the split makes no difference to the estimate."""
    free = CostModel(fixed_ms=0, token_ms=0, attention_ms_per_gflop=0, kv_ms_per_mib=0)
    assert len(plan_buckets([3, 1, 2], free, GEOMETRY)) == 1


def test_equal_lengths_are_split_by_the_limit_alone():
    """Guards against a limit taken for one token less, and for one on prompts."""
    costs = CostModel(max_tokens=50)
    assert [len(plan_buckets([10] * count, costs, GEOMETRY)) for count in (5, 6, 10, 11)] == [1, 2, 2, 3]


def test_a_prompt_over_the_limit():
    """Guards against a forward larger than allowed, and against an error that does not say which prompt is at fault."""
    with pytest.raises(PrefillLimitError, match=r"prompt 2 has 65 tokens and CostModel.max_tokens is 64"):
        plan_buckets([64, 1, 65, 99], CostModel(max_tokens=64), GEOMETRY)
    assert plan_buckets([64, 1, 65, 99], CostModel(max_tokens=None), GEOMETRY)


@pytest.mark.parametrize(
    "lengths",
    [[0], [3, -1], [1.5], ["3"], [True], [None], [[1], [2]], [[1], [2, 3]], [2**24 + 1], [2**64 - 1]],
    ids=repr,
)
def test_lengths_that_are_none(lengths):
    """Guards against a plan over prompts that cannot be."""
    with pytest.raises(PromptError, match="lengths must be whole numbers of at least 1"):
        plan_buckets(lengths, CostModel(max_tokens=None), GEOMETRY)


def test_no_prompts_and_arrays():
    """Guards against an error where there is nothing to do, and lengths that must be a list."""
    assert plan_buckets([], CostModel(), GEOMETRY) == ()
    lengths = np.array([5, 2, 9], np.int32)
    assert plan_buckets(lengths, CostModel(), GEOMETRY) == plan_buckets([5, 2, 9], CostModel(), GEOMETRY)


def test_errors_are_of_the_package():
    """Guards against a caller who catches LiverollError missing one."""
    assert issubclass(PrefillLimitError, LiverollError)
    assert issubclass(ConfigError, LiverollError)
