"""`engine.plan` tells which route `generate` takes, and runs and changes nothing."""

from __future__ import annotations

import pytest
import torch
import zoo
from device_reads import DeviceReads
from snapshots import ForwardCounter, Trap, left_as_found, raising

from liveroll import (
    ConfigError,
    CostModel,
    EngineStateError,
    PrefillLimitError,
    RolloutConfig,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
    UnsupportedModelError,
)
from liveroll.model.geometry import AttentionTraits, LayerSpec, ModelShape
from liveroll.model.identity import counted_geometry, declared_geometry
from liveroll.planning.prefill import PrefillPlanner
from liveroll.prompts import read_prompts

MODEL = zoo.build("llama")
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=5)
GREEDY = SamplingConfig(max_new_tokens=6)
# Each has auto take another route for the prompts above.
CHOICES = {
    "ordinary": CostModel(),
    "packed": CostModel(ordinary_step_ms=99.0),
    "bucketed": CostModel(ordinary_step_ms=99.0, packed_fixed_ms=99.0, fixed_ms=0.5),
}


def engine(model=MODEL, **settings):
    return RolloutEngine(model, config=RolloutConfig(**{"prefill_route": "auto", "page_size": 4, **settings}))


def requests_of(rows, width=12):
    """A padded batch of `rows` prompts."""
    prompts = zoo.ragged_prompts(zoo.VOCAB_SIZE, rows, [1 + row % width for row in range(rows)])
    return RolloutRequest(*zoo.left_pad(prompts, 0))


@pytest.mark.parametrize("route", CHOICES)
def test_a_call_takes_the_route_that_was_planned(route):
    """Guards against an explanation of something else than what runs."""
    rollouts = engine(costs=CHOICES[route])
    before = rollouts.plan(PROMPTS, GREEDY)
    stats = rollouts.generate(PROMPTS, GREEDY).stats
    assert before.route == route == stats.route == rollouts.plan(PROMPTS, GREEDY).route
    assert stats.prefill_routes == {route: len(before.chosen.forwards)} == {route: stats.prefill_forwards}
    assert before.decode_steps == stats.decode_steps
    assert list(before.lengths) == [len(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("route", ["packed", "bucketed", "equal_width", "per_prompt", "ordinary"])
def test_a_configured_route_is_explained_too(route):
    """Guards against a plan that only auto has."""
    rollouts = engine(prefill_route=route)
    plan = rollouts.plan(PROMPTS, GREEDY)
    stats = rollouts.generate(PROMPTS, GREEDY).stats
    assert (plan.route, plan.configured, stats.route) == (route, route, route)
    assert stats.prefill_routes == {route: len(plan.chosen.forwards)}


def test_samples_are_rows():
    """Guards against a plan that counts prompts where rows take the slots."""
    plan = engine(max_slots=4).plan(PROMPTS, SamplingConfig(max_new_tokens=3, n=2))
    assert (plan.rows, len(plan.lengths)) == (10, 4)
    obstacles = {candidate.route: candidate.obstacle for candidate in plan.candidates}
    assert obstacles["ordinary"] == "10 rows do not fit 4 slots"


@pytest.mark.parametrize("route", ["packed", "bucketed", "equal_width", "per_prompt", "ordinary"])
def test_samples_share_a_forward(route):
    """Guards against a plan in which every sample runs its prompt, where only `model.generate` repeats it."""
    rollouts = engine(prefill_route=route, costs=CHOICES["bucketed"])
    prompts, sampling = [*PROMPTS, PROMPTS[1]], SamplingConfig(max_new_tokens=3, n=3, temperature=1.0)
    plan = rollouts.plan(prompts, sampling)
    stats = rollouts.generate(prompts, sampling).stats
    assert stats.prefill_routes == {route: len(plan.chosen.forwards)}
    rows = sorted(row for forward in plan.chosen.forwards for row in forward.indices)
    if route == "ordinary":
        assert rows == list(range(18))
    else:
        assert [plan.lengths[row] for row in rows] == [len(prompt) for prompt in PROMPTS]
        alone = rollouts.plan(PROMPTS, SamplingConfig(max_new_tokens=3))
        for field in ("fixed_ms", "token_ms", "attention_ms", "kv_ms"):
            assert getattr(plan.chosen, field) == pytest.approx(getattr(alone.chosen, field))
        assert stats.prefill_tokens - stats.padded_tokens == sum(map(len, PROMPTS))


def test_the_rows_admitted_first_are_planned():
    """Guards against a plan of other rows than those that the first prefill runs."""
    budgets = [SamplingConfig(max_new_tokens=budget) for budget in (2, 9, 3, 8, 4)]
    plan = engine(max_slots=2).plan(PROMPTS, budgets)
    assert plan.lengths == (len(PROMPTS[1]), len(PROMPTS[3]))
    assert plan.decode_steps == 8


def test_planning_runs_and_changes_nothing():
    """Guards against a forward, a seed used up, or storage taken for an explanation."""
    sampled = SamplingConfig(max_new_tokens=6, temperature=1.0)
    planned, plain = engine(), engine()
    for _ in range(2):
        with left_as_found(MODEL), ForwardCounter(MODEL) as forwards:
            planned.plan(PROMPTS, sampled)
        assert (forwards.count, planned.captures) == (0, 0)
        drawn, expected = planned.generate(PROMPTS, sampled), plain.generate(PROMPTS, sampled)
        assert drawn.completions == expected.completions
    assert engine().memory().total == 0


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_the_declared_geometry_is_the_real_one(name):
    """Guards against heads or dimensions that one architecture names otherwise."""
    # The zoo gives every configuration a number of KV heads, also where the architecture has none and does not read it.
    model = zoo.build(name, num_key_value_heads=4) if name in ("opt", "gpt2", "gpt_neox") else zoo.shared(name)
    rollouts = engine(model)
    before = rollouts.plan(PROMPTS, GREEDY).geometry
    rollouts.generate(PROMPTS[:2], SamplingConfig(max_new_tokens=2))
    after = rollouts.plan(PROMPTS, GREEDY).geometry
    assert before == after == declared_geometry(model)
    assert after.element_bytes == 4


def test_layers_as_they_attended_count(monkeypatch):
    """Guards against a plan by the configuration where the layers were seen to be otherwise, as with sharded heads."""
    rollouts = engine()
    rollouts.generate(PROMPTS[:2], SamplingConfig(max_new_tokens=2))
    seen = rollouts.plan(PROMPTS, GREEDY).geometry
    monkeypatch.setattr(MODEL.config, "num_attention_heads", 40)
    assert rollouts.plan(PROMPTS, GREEDY).geometry == seen
    assert engine().plan(PROMPTS, GREEDY).geometry.query_heads == 40


def test_a_configuration_without_a_shape():
    """Guards against an attribute error for a plan, and against a call that needs no plan being refused for it."""
    model = zoo.build("llama")
    vars(model.config)["num_attention_heads"] = None  # past the validation that some versions have
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM does not give its geometry: .*query_heads"):
        engine(model).plan(PROMPTS, GREEDY)
    assert engine(model, auto_routes=("packed", "bucketed")).generate(PROMPTS, GREEDY)


def test_what_generate_refuses():
    """Guards against a plan of a call that cannot be."""
    with pytest.raises(PrefillLimitError, match="prompt 4 has 20 tokens and max_tokens of its costs is 19"):
        engine(costs=CostModel(max_tokens=19)).plan(PROMPTS, GREEDY)
    with pytest.raises(PrefillLimitError, match="prompt 4 has 20 tokens and prefill_max_tokens is 19"):
        engine(costs=CostModel(), prefill_max_tokens=19).plan(PROMPTS, GREEDY)
    model = zoo.build("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        engine(model, fallback="generate").plan(PROMPTS, GREEDY)
    rollouts = engine()
    stream = rollouts.stream(PROMPTS, GREEDY)
    next(stream)
    with pytest.raises(EngineStateError):
        rollouts.plan(PROMPTS, GREEDY)
    stream.close()


def test_auto_routes_are_kept_to():
    """Guards against a route that was left out being taken for a call or a refill."""
    rollouts = engine(max_slots=2, auto_routes=("bucketed", "ordinary"), costs=CHOICES["packed"])
    assert rollouts.generate(PROMPTS, GREEDY).stats.prefill_routes.keys() == {"bucketed"}
    two = rollouts.generate(PROMPTS[:2], GREEDY).stats
    assert two.prefill_routes.keys() == {"bucketed"}
    assert engine(auto_routes=("packed", "bucketed")).generate(PROMPTS, GREEDY).stats.route == "packed"


TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # keys and values, layers, KV heads, dimensions, bytes


@pytest.mark.parametrize(
    ("setting", "least", "reason"),
    [
        ("max_length", 32, "RolloutConfig.max_length"),
        ("kv_tokens", 5 * 31, "KV memory"),
        ("kv_bytes", 5 * 31 * TOKEN_BYTES, "KV memory"),
        ("prefill_max_tokens", 5 * 20, "token positions"),
        ("max_slots", 5, "slots"),
        ("max_position_embeddings", 32, "max_position_embeddings"),
    ],
)
def test_a_call_goes_to_generate_only_where_it_fits(setting, least, reason):
    """Guards against a limit of the configuration, or of the model, that the padded batch does not keep to."""
    # Each row fits by itself: the longest prompt has 20 tokens and a budget of 2, and the others are shorter.
    sampling = [SamplingConfig(max_new_tokens=budget) for budget in (12, 12, 12, 12, 2)]
    for value in (least, least - 1):
        of_model = setting == "max_position_embeddings"
        model = zoo.build("llama", **{setting: value}) if of_model else MODEL
        rollouts = engine(model, **({} if of_model else {setting: value}))
        plan = rollouts.plan(PROMPTS, sampling)
        obstacle = next(candidate.obstacle for candidate in plan.candidates if candidate.route == "ordinary")
        batch = rollouts.generate(PROMPTS, sampling)
        assert batch.stats.route == plan.route
        if value == least:
            assert (plan.route, obstacle) == ("ordinary", None)
        else:
            assert plan.route == "packed"
            assert reason in obstacle


def test_a_refill_is_planned_for_its_own_prompts(monkeypatch):
    """Guards against running rows that are planned, and so priced, again with every prompt that is admitted."""
    admissions = []
    plan = PrefillPlanner.plan

    def noted(self, lengths):
        admissions.append(list(lengths))
        return plan(self, lengths)

    monkeypatch.setattr(PrefillPlanner, "plan", noted)
    prompts = [[1] * 3, [2] * 4, [3] * 5, [4] * 6]
    budgets = [9, 6, 4, 2]
    settings = [SamplingConfig(max_new_tokens=budget, temperature=0, stop_token_ids=()) for budget in budgets]
    auto_routes = ("packed", "bucketed")
    RolloutEngine(
        MODEL, config=RolloutConfig(prefill_route="auto", auto_routes=auto_routes, max_slots=2, run_ahead=0)
    ).generate(prompts, settings)
    assert sorted(length for admission in admissions for length in admission) == [3, 4, 5, 6]
    assert [len(admission) for admission in admissions] == [2, 1, 1]


def test_a_stream_takes_the_planned_route():
    """Guards against streams that follow the configuration and not the plan."""
    for route, costs in CHOICES.items():
        rollouts = engine(costs=costs)
        with ForwardCounter(MODEL) as forwards:
            found = sorted((done.prompt_index, done.token_ids) for done in rollouts.stream(PROMPTS, GREEDY))
        # The first forward shows the layers; hooks run in prefills, and in the decode steps of `model.generate`.
        prefills = len(rollouts.plan(PROMPTS, GREEDY).chosen.forwards)
        assert forwards.count == 1 + prefills + (5 if route == "ordinary" else 0)
        assert [list(tokens) for _, tokens in found] == [
            zoo.reference(MODEL, prompt, max_new_tokens=6) for prompt in PROMPTS
        ]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory left"), RuntimeError("a broken kernel")])
@pytest.mark.parametrize("route", CHOICES)
def test_errors_of_the_model_are_passed_on(route, error):
    """Guards against another route, or `model.generate`, tried in silence after the chosen one has failed."""
    model = zoo.build("llama")
    rollouts = engine(model, costs=CHOICES[route], fallback="generate")
    rollouts.generate(PROMPTS, GREEDY)
    trap = Trap(model, 1, raising(error))
    with left_as_found(model), pytest.raises(type(error), match=str(error)):
        rollouts.generate(PROMPTS, GREEDY)
    assert trap.calls == 1
    trap.remove()
    assert rollouts.generate(PROMPTS, GREEDY).stats.route == route


def test_a_padded_batch_is_read_once():
    """Guards against a scalar read from the device for every row."""
    for rows in (2, 64):
        batch = requests_of(rows)
        with DeviceReads(batch.prompt_ids, batch.prompt_attention_mask) as reads:
            read = read_prompts(batch, tokenizer=None, pad_token_id=0, vocab_size=zoo.VOCAB_SIZE)
        assert len(read.prompts) == rows
        assert reads.count == 1


def test_planning_reads_no_more_for_more_rows():
    """Guards against lengths, masks or settings that are read row by row on the way to a plan."""
    counts = []
    for rows in (2, 64):
        batch = requests_of(rows)
        rollouts = engine(max_slots=64)
        with DeviceReads(batch.prompt_ids, batch.prompt_attention_mask) as reads:
            plan = rollouts.plan(batch, GREEDY)
        assert len(plan.lengths) == rows
        counts.append(reads.count)
    assert counts[0] == counts[1] <= 3


def test_reads_are_seen():
    """Guards against a counter that counts nothing."""
    mask = torch.ones(3, 4)
    with DeviceReads(mask) as reads:
        lengths = [int(row.sum()) for row in mask]
        mask.cpu().sum().item()
    assert lengths == [4, 4, 4]
    assert reads.count == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int8, torch.float32])
def test_lengths_are_counted_and_not_summed(dtype):
    """Guards against a mask added up in its own dtype: bfloat16 counts to 256, int8 to 127."""
    ids = torch.ones(2, 300, dtype=torch.int64)
    mask = torch.zeros(2, 300, dtype=dtype)
    mask[0, 43:], mask[1, 290:] = 1, 1
    plan = engine().plan(RolloutRequest(ids, mask), GREEDY)
    assert plan.lengths == (257, 10)


def test_any_nonzero_mask_entry_counts():
    """Guards against a mask taken for weights."""
    plan = engine().plan(RolloutRequest(torch.ones(1, 4, dtype=torch.int64), torch.tensor([[0, 0.25, -1, 3]])), GREEDY)
    assert plan.lengths == (3,)


def test_geometry_of_layers_that_differ():
    """Guards against the shape of the first layer being taken for that of all."""
    traits = AttentionTraits(scale=1.0, window=None, softcap=None)
    layers = (LayerSpec(8, 4, 16, 32, traits, False), LayerSpec(4, 2, 8, 8, traits, False))
    geometry = counted_geometry(ModelShape(layers, 97, None), torch.bfloat16)
    assert geometry.element_bytes == 2
    assert geometry.query_heads == (8, 4)
    assert geometry.head_dim == (24, 8)
    assert geometry.query_width == 8 * 24 + 4 * 8
    assert geometry.kv_width == 4 * 24 + 2 * 8
