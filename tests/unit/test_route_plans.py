"""Routes are compared by the documented costs, and only routes that a call fits may be taken."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveroll import CostModel, ModelGeometry
from liveroll.planning.prefill import Forward, PrefillPlanner, plan_forwards, price_forwards
from liveroll.planning.routes import PAGED_ROUTES, ROUTES, Room, is_ordinary_cheapest, is_ordinary_outdone, plan_routes

# Qwen2.5-3B in fp32.
GEOMETRY = ModelGeometry(layers=36, query_heads=16, kv_heads=2, head_dim=128, element_bytes=4)
GFLOP = 4 * 36 * 16 * 128 / 1e9  # of one squared length
MIB = 2 * 36 * 2 * 128 * 4 / 2**20  # of one token
WORKLOADS = {
    "short": [20, 19, 18, 17, 16, 15, 14, 13] * 4,
    "long tail": [512] + [16] * 31,
    "short tail": [20] + [1] * 31,
    "moderate": [128] + [4] * 31,
    "spread": list(range(16, 513, 16)),
}
UNPACKED = tuple(route for route in ROUTES if route != "packed")
WIDE = Room(slots=32, row_limits={}, kv_tokens=None)

steady = settings(deadline=None, derandomize=True, database=None, max_examples=200)
coefficients = st.sampled_from([0.0, 0.01, 0.1, 1.0, 25.0])
optional = st.none() | coefficients
cost_models = st.builds(
    CostModel,
    fixed_ms=coefficients,
    token_ms=coefficients,
    attention_ms_per_gflop=coefficients,
    kv_ms_per_mib=coefficients,
    packed_fixed_ms=optional,
    packed_token_ms=optional,
    packed_attention_ms_per_gflop=optional,
    ordinary_fixed_ms=optional,
    decode_step_ms=coefficients,
    decode_row_ms=coefficients,
    ordinary_step_ms=coefficients,
    ordinary_row_ms=coefficients,
    max_tokens=st.none() | st.integers(50, 400),
)


def compare(lengths, budget=16, *, costs=None, room=WIDE, rows=None, configured="auto", allowed=ROUTES, **more):
    return plan_routes(
        lengths,
        more.get("budgets", [budget] * len(lengths)),
        runs=more.get("runs", range(len(lengths))),
        rows=rows or len(lengths),
        configured=configured,
        allowed=allowed,
        room=room,
        costs=costs or CostModel(),
        geometry=GEOMETRY,
    )


def candidate(plan, route):
    return next(entry for entry in plan.candidates if entry.route == route)


def terms(plan, route):
    entry = candidate(plan, route)
    return (entry.fixed_ms, entry.token_ms, entry.attention_ms, entry.kv_ms, entry.decode_ms)


def shapes(entry):
    return [(len(forward.indices), forward.width) for forward in entry.forwards]


def test_terms_of_padded_routes():
    """Guards against a term that is lost, doubled, or taken from another route's."""
    plan = compare(WORKLOADS["long tail"])
    tokens, squares = 31 * 16 + 512, 31 * 16**2 + 512**2
    decode = 15 * 10.0
    few = (0.1 * tokens, 0.01 * squares * GFLOP, 0.04 * tokens * MIB, decode)
    assert terms(plan, "bucketed") == pytest.approx((50.0, *few))
    assert terms(plan, "per_prompt") == pytest.approx((32 * 25.0, *few))
    many = (0.1 * 32 * 512, 0.01 * 32 * 512**2 * GFLOP, 0.04 * 32 * 512 * MIB, decode)
    assert terms(plan, "equal_width") == pytest.approx((25.0, *many))
    assert terms(plan, "packed") == pytest.approx((25.0, *few))
    assert terms(plan, "ordinary") == pytest.approx((25.0, *many[:2], 0.0, 0.0))
    for entry in plan.candidates:
        assert entry.cost_ms == pytest.approx(sum(terms(plan, entry.route)))


def test_coefficients_of_their_own():
    """Guards against a coefficient that nothing reads, or that another route reads too."""
    costs = CostModel(
        packed_fixed_ms=3.0,
        packed_token_ms=0.5,
        packed_attention_ms_per_gflop=0.25,
        ordinary_fixed_ms=7.0,
        decode_step_ms=2.0,
        decode_row_ms=0.125,
        ordinary_step_ms=4.0,
        ordinary_row_ms=0.5,
    )
    plan = compare([10, 20, 30], costs=costs, budgets=[5, 9, 2])
    # The rows have 4, 8 and 1 decode steps; model.generate runs all of them for 8.
    decode, ordinary = 8 * 2.0 + 13 * 0.125, 8 * 4.0 + 8 * 3 * 0.5
    packed = (3.0, 0.5 * 60, 0.25 * 1400 * GFLOP, 0.04 * 60 * MIB, decode)
    assert terms(plan, "packed") == pytest.approx(packed)
    assert terms(plan, "equal_width") == pytest.approx((25.0, 0.1 * 90, 0.01 * 2700 * GFLOP, 0.04 * 90 * MIB, decode))
    assert terms(plan, "ordinary") == pytest.approx((7.0, 0.1 * 90, 0.01 * 2700 * GFLOP, 0.0, ordinary))
    assert plan.decode_steps == 8


def test_keys_that_decode_steps_attend_to():
    """Guards against keys counted at the prompt's length throughout, without padding, or past a row's own budget."""
    costs = CostModel(decode_step_ms=0.0, decode_kv_ms_per_mib=0.5, ordinary_kv_ms_per_mib=2.0)
    plan = compare([10, 30], costs=costs, budgets=[4, 2])
    # Steps over 11, 12 and 13 keys, and one over 31; model.generate has two rows of 31, 32 and 33.
    assert candidate(plan, "packed").decode_ms == pytest.approx(0.5 * (11 + 12 + 13 + 31) * MIB)
    assert candidate(plan, "ordinary").decode_ms == pytest.approx(2.0 * 2 * (31 + 32 + 33) * MIB)


def test_one_token_takes_no_decode_step():
    """Guards against a decode step for the token that the prefill gives."""
    plan = compare([4, 4], 1)
    assert {entry.decode_ms for entry in plan.candidates} == {0.0}
    assert plan.decode_steps == 0


@pytest.mark.parametrize(
    ("workload", "budget", "route", "forwards"),
    [
        ("short", 16, "ordinary", 1),
        ("long tail", 16, "bucketed", 2),
        ("short tail", 16, "ordinary", 1),
        ("moderate", 16, "bucketed", 2),
        ("spread", 16, "bucketed", 6),
        ("long tail", 128, "bucketed", 2),
        ("long tail", 512, "ordinary", 1),
    ],
)
def test_choices_with_the_defaults(workload, budget, route, forwards):
    """Guards against other choices than those that were measured to be best with these coefficients."""
    plan = compare(WORKLOADS[workload], budget, allowed=UNPACKED)
    assert (plan.route, len(plan.chosen.forwards)) == (route, forwards)


def test_without_padding_where_it_is_allowed():
    """Guards against padding that a packed forward would not have."""
    plan = compare(WORKLOADS["long tail"])
    assert plan.route == "packed"
    assert shapes(plan.chosen) == [(32, None)]
    assert candidate(compare([5, 5], allowed=UNPACKED), "packed").obstacle == "auto_routes leaves it out"


def test_a_captured_step_that_is_cheaper_than_ordinary():
    """Guards against a model in which continuous decoding can only be the dearer one."""
    costs = CostModel(decode_step_ms=3.0, ordinary_step_ms=30.0)
    assert compare(WORKLOADS["short"], 128, allowed=UNPACKED).route == "ordinary"
    assert compare(WORKLOADS["short"], 128, allowed=UNPACKED, costs=costs).route == "bucketed"


def test_a_configured_route_is_taken_whatever_it_costs():
    """Guards against a plan that tells of another route than the one that runs."""
    for route in ROUTES:
        plan = compare(WORKLOADS["long tail"], configured=route)
        assert (plan.route, plan.chosen.route, plan.configured) == (route, route, route)
        assert {entry.route for entry in plan.candidates} == set(ROUTES)


@pytest.mark.parametrize(
    ("room", "rows", "costs", "message"),
    [
        (Room(3, {}, None), 4, {}, "4 rows do not fit 3 slots"),
        (Room(4, {}, None), 4, {"max_tokens": 39}, "4 rows padded to 10 tokens are over the limit of 39 token"),
        (Room(4, {"max_length": 15}, None), 4, {}, "padded to 10 tokens comes to hold 16, and max_length is 15"),
        (Room(4, {}, 59), 4, {}, "4 rows of up to 15 keys and values do not fit KV memory for 59 tokens"),
    ],
)
def test_what_keeps_a_call_from_the_ordinary_route(room, rows, costs, message):
    """Guards against a batch for `model.generate` that is larger than what the engine was allowed."""
    lengths, budget = [2, 10, 3, 4], 6
    shown = lengths[: room.slots]
    cheap = CostModel(**{"decode_step_ms": 1e6, **costs})
    plan = compare(shown, budget, costs=cheap, room=room, rows=rows, budgets=[budget] * len(shown))
    assert message in candidate(plan, "ordinary").obstacle
    assert plan.route != "ordinary"
    # One more of what it lacks, and it is taken.
    more = Room(
        room.slots + 1,
        {name: limit + 1 for name, limit in room.row_limits.items()},
        room.kv_tokens and room.kv_tokens + 1,
    )
    roomy = CostModel(decode_step_ms=1e6, max_tokens=costs["max_tokens"] + 1 if costs else None)
    assert compare(lengths, budget, costs=roomy, room=more).route == "ordinary"


@steady
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12), costs=cost_models, data=st.data())
def test_an_admission_takes_the_cheapest_route(lengths, costs, data):
    """Guards against a bound, or a route left out, that loses the cheapest one."""
    routes = data.draw(st.lists(st.sampled_from(PAGED_ROUTES), min_size=1, unique=True).map(sorted))
    routes = [route for route in ROUTES if route in routes]
    plan = PrefillPlanner(routes, costs, GEOMETRY).plan(lengths)
    assert plan.route in routes
    assert plan.forwards == plan_forwards(plan.route, lengths, costs, GEOMETRY)
    prices = {
        route: price_forwards(route, plan_forwards(route, lengths, costs, GEOMETRY), lengths, costs, GEOMETRY).total_ms
        for route in routes
    }
    assert prices[plan.route] == pytest.approx(min(prices.values()), rel=1e-8)


@steady
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12), costs=cost_models, budget=st.integers(1, 5))
def test_a_call_and_its_admission_agree(lengths, costs, budget):
    """Guards against a plan that explains another choice than the one that the first admission makes."""
    plan = compare(lengths, budget, costs=costs)
    eligible = [entry.cost_ms for entry in plan.candidates if entry.obstacle is None]
    assert plan.chosen.cost_ms == pytest.approx(min(eligible), rel=1e-8)
    if plan.route != "ordinary":
        admitted = PrefillPlanner(PAGED_ROUTES, costs, GEOMETRY).plan(lengths)
        assert plan.chosen.cost_ms == pytest.approx(candidate(plan, admitted.route).cost_ms, rel=1e-8)


def test_equal_costs_take_the_first_route():
    """Guards against a choice left to rounding: prompts of one length cost the same packed and padded."""
    for lengths in ([7] * 30, [100] * 3, [33] * 17):
        assert PrefillPlanner(PAGED_ROUTES, CostModel(), GEOMETRY).plan(lengths).route == "packed"
        plan = compare(lengths, costs=CostModel(ordinary_step_ms=100.0))
        assert plan.route == "packed"


def test_a_bound_is_not_above_what_it_bounds():
    """Guards against buckets that are passed over, though cheaper than packed, since a limit was counted twice."""
    costs = CostModel(fixed_ms=10.0, packed_fixed_ms=15.0, max_tokens=40)
    assert PrefillPlanner(PAGED_ROUTES, costs, GEOMETRY).plan([10] * 4).route == "bucketed"


def test_contexts_over_the_limit_are_prefilled_alone():
    """Guards against a preempted row, longer than any prompt may be, that is refused or padded to by others."""
    costs = CostModel(max_tokens=20, fixed_ms=1e6)
    forwards = plan_forwards("bucketed", [3, 25, 4, 30, 5], costs, GEOMETRY)
    assert forwards == (Forward((0, 2, 4), 5), Forward((1,), 25), Forward((3,), 30))
    assert PrefillPlanner(PAGED_ROUTES, costs, GEOMETRY).plan([25, 3]).forwards


@steady
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=12),
    cost_models,
    st.sets(st.sampled_from(PAGED_ROUTES), min_size=1),
    st.integers(1, 12),
)
def test_whether_ordinary_is_the_cheapest(rows, costs, others, runs):
    """Guards against a short answer that is not the one of the whole plan: a route left out, or a tie taken."""
    lengths, budgets = map(list, zip(*rows, strict=True))
    costs = CostModel(**{**vars(costs), "max_tokens": None})
    allowed = tuple(route for route in ROUTES if route in others or route == "ordinary")
    question = {"runs": range(min(runs, len(rows))), "allowed": allowed}
    plan = compare(lengths, budgets=budgets, costs=costs, **question)
    found = is_ordinary_cheapest(lengths, budgets, costs=costs, geometry=GEOMETRY, **question)
    assert found == (plan.route == "ordinary")
    known = {"allowed": allowed, "costs": costs, "geometry": GEOMETRY}
    assert not (found and is_ordinary_outdone(len(rows), max(lengths), max(budgets), **known))


def test_a_call_is_decided_by_its_longest_row():
    """Guards against a bound that never decides, so that every call is looked at row by row."""
    known = {"allowed": ROUTES, "costs": CostModel(decode_step_ms=25.0, ordinary_step_ms=30.0), "geometry": GEOMETRY}
    assert is_ordinary_outdone(32, 512, 16, **known)
    cheap = CostModel(decode_step_ms=25.0, ordinary_step_ms=20.0)
    assert not is_ordinary_outdone(32, 16, 128, **(known | {"costs": cheap}))
    assert not is_ordinary_outdone(32, 512, 16, **(known | {"allowed": ("per_prompt", "ordinary")}))
