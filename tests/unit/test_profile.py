"""The profile of a call: every moment of it in one part, and the right one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from snapshots import left_as_found
from texts import character_tokenizer

from liveroll import RolloutConfig, RolloutEngine, RolloutProfile, SamplingConfig
from liveroll.timeline import RecordedTimeline

MODEL = zoo.build("llama")
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=5)
BUDGET = 8
GREEDY = SamplingConfig(max_new_tokens=BUDGET)
ROUTES = ("packed", "bucketed", "equal_width", "per_prompt", "ordinary")


class Clock:
    """Stands still, but for what is told to take time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self._patch = monkeypatch
        monkeypatch.setattr("liveroll.timeline.time", SimpleNamespace(perf_counter=lambda: self.now))

    def replace(self, owner: object, name: str, by: Callable[..., Any]) -> None:
        """Let a function do something else."""
        self._patch.setattr(owner, name, by)

    def charge(self, owner: object, name: str, seconds: float) -> None:
        """Let a function take time."""
        inner = getattr(owner, name)

        def timed(*arguments, **settings):
            self.now += seconds
            return inner(*arguments, **settings)

        self._patch.setattr(owner, name, timed)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def engine(tokenizer=None, **settings):
    return RolloutEngine(MODEL, tokenizer, RolloutConfig(**{"max_slots": 2, "profile": True, **settings}))


def profile_of(batch) -> RolloutProfile:
    assert batch.stats.profile is not None
    return batch.stats.profile


def test_each_moment_is_in_one_part(clock):
    """Guards against time counted twice, lost between parts, or lost behind the last of them."""
    timeline = RecordedTimeline(torch.device("cpu"))
    for part, seconds in (("planning", 1), ("prefill", 2), ("planning", 4), ("decode", 8)):
        clock.now += seconds
        timeline.enter(part)
    clock.now += 16
    assert timeline.finish() == 31
    spent = {part: seconds for part, seconds in timeline.seconds.items() if seconds}
    assert spent == {"intake": 1, "planning": 2 + 8, "prefill": 4, "decode": 16}


@pytest.mark.parametrize("capture", ["auto", False])
@pytest.mark.parametrize("route", ROUTES)
def test_time_is_counted_where_it_is_spent(route, capture, clock):
    """Guards against a forward, the preparation or the detokenising counted to another part, or to none."""
    rollouts = engine(character_tokenizer(), prefill_route=route, capture=capture)
    clock.charge(MODEL.model.norm, "forward", 1)
    clock.charge(MODEL, "_prepare_generation_config", 1000)
    clock.charge(rollouts.tokenizer, "decode", 1e6)
    probes = 0 if route == "ordinary" else 1
    for _ in range(2):
        before = clock.now
        stats = rollouts.generate(PROMPTS, GREEDY).stats
        profile = stats.profile
        assert profile.prefill_forwards == stats.prefill_forwards > 0
        assert profile.decode_forwards == stats.decode_steps > 0
        assert profile.prefill_ms == pytest.approx(1e3 * stats.prefill_forwards)
        assert profile.decode_ms == pytest.approx(1e3 * stats.decode_steps)
        assert profile.capture_ms == pytest.approx(1e3 * stats.captures)
        assert profile.cache_ms == pytest.approx(1e3 * probes)
        assert profile.intake_ms == pytest.approx(1e6)
        assert profile.postprocessing_ms == pytest.approx(1e9 * len(PROMPTS))
        assert profile.scheduling_ms == profile.planning_ms == 0
        assert profile.wall_ms == pytest.approx(1e3 * (clock.now - before))
        assert stats.seconds == pytest.approx(clock.now - before)
        assert (profile.prefill_device_ms, profile.decode_device_ms) == (None, None)
        probes = 0


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize(
    ("owner", "name", "part"),
    [
        ("liveroll.planning.prefill.PrefillPlanner", "plan", "planning"),
        ("liveroll.stage.Stage", "takes_ordinary", "planning"),
        ("liveroll.scheduling.scheduler.Scheduler", "plan", "scheduling"),
        ("liveroll.scheduling.scheduler.Scheduler", "commit", "scheduling"),
        ("liveroll.decode.decoder.Decoder", "prepare", "cache"),
        ("liveroll.decode.state.RowState", "load_table", "cache"),
    ],
)
def test_what_the_host_does_itself(owner, name, part, run_ahead, clock):
    """Guards against planning, scheduling or the cache being counted to the forwards around them."""
    rollouts = engine(run_ahead=run_ahead, prefill_route="auto")
    clock.charge(_found(owner), name, 1)
    profile = profile_of(rollouts.generate(PROMPTS, GREEDY))
    assert getattr(profile, f"{part}_ms") == profile.wall_ms > 0


def test_a_call_begins_before_its_weights_are_at_hand(clock):
    """Guards against a profile that says nothing of gathering weights, which takes longer than the rest of intake."""
    rollouts = engine()
    clock.charge(_found("liveroll.distributed.weights.ShardedWeights"), "find", 1)
    stats = rollouts.generate(PROMPTS, GREEDY).stats
    assert stats.profile.intake_ms == stats.profile.wall_ms == 1e3
    assert stats.seconds == 1


def test_measuring_costs_is_no_part_of_a_call(clock):
    """Guards against a first call that seems a hundred times slower than the next."""
    rollouts = engine(prefill_route="auto", costs="auto")
    costs = RolloutEngine(MODEL).costs
    clock.replace(_found("liveroll.tools.costs_cache"), "find_or_measure", lambda model, config: costs)
    clock.charge(_found("liveroll.tools.costs_cache"), "find_or_measure", 12)
    for _ in range(2):
        stats = rollouts.generate(PROMPTS, GREEDY).stats
        assert stats.profile.wall_ms == stats.seconds == 0


def test_a_result_counts_to_its_own_step(clock):
    """Guards against waiting for a prefill counted to the decode step launched after it."""
    rollouts = engine(run_ahead=2)
    clock.charge(_found("liveroll.decode.runner"), "StepResult", 1)
    batch = rollouts.generate(PROMPTS[:2], GREEDY)
    profile = profile_of(batch)
    assert profile.prefill_ms == pytest.approx(1e3)
    assert profile.decode_ms == pytest.approx(1e3 * batch.stats.decode_steps)


@pytest.mark.parametrize(
    ("owner", "name", "part"),
    [
        ("liveroll.decode.state.RowState", "admit", "cache"),
        ("liveroll.ordinary", "_finish", "postprocessing"),
    ],
)
def test_what_surrounds_ordinary_generation(owner, name, part, clock):
    """Guards against the batch's own set-up and end counted to what `model.generate` does."""
    rollouts = engine(prefill_route="ordinary")
    clock.charge(_found(owner), name, 1)
    profile = profile_of(rollouts.generate(PROMPTS, GREEDY))
    assert getattr(profile, f"{part}_ms") == profile.wall_ms > 0


def _found(name):
    module, _, attribute = name.rpartition(".")
    if attribute[0].isupper():
        return getattr(__import__(module, fromlist=[attribute]), attribute)
    return __import__(name, fromlist=["_"])


@pytest.mark.parametrize("route", ROUTES)
def test_a_profile_changes_nothing(route):
    """Guards against other tokens with a profile, against one that nobody asked for, and a model left changed."""
    sampled = SamplingConfig(max_new_tokens=BUDGET, temperature=1.0, n=2, seed=3)
    with left_as_found(MODEL):
        plain = engine(prefill_route=route, profile=False).generate(PROMPTS, sampled)
        profiled = engine(prefill_route=route).generate(PROMPTS, sampled)
    assert plain.stats.profile is None
    assert [c.token_ids for c in plain.completions] == [c.token_ids for c in profiled.completions]
    profile = profile_of(profiled)
    assert profile.wall_ms == pytest.approx(profiled.stats.seconds * 1e3, rel=1e-9)


@pytest.mark.parametrize("route", ROUTES)
def test_tokens_and_capacity(route):
    """Guards against capacity that counts first tokens, which no decode step gave, or leaves out idle slots."""
    budgets = (1, 5, 3)
    settings = [SamplingConfig(max_new_tokens=budget) for budget in budgets]
    profile = profile_of(engine(max_slots=4, prefill_route=route).generate(PROMPTS[:3], settings))
    assert profile.productive_tokens == sum(budgets)
    assert profile.active_capacity == sum(budgets) - len(budgets)
    assert profile.decode_forwards == max(budgets) - 1
    assert profile.configured_capacity == 4 * (max(budgets) - 1)


def test_preempted_rows_are_prefilled_twice_and_their_tokens_counted_once():
    """Guards against the tokens of a second prefill counted as the decode steps' own."""
    rollouts = engine(max_slots=4, kv_tokens=48, page_size=4)
    batch = rollouts.generate([[3] * 8] * 4, SamplingConfig(max_new_tokens=24))
    assert batch.stats.preemptions > 0
    profile = profile_of(batch)
    assert profile.productive_tokens == 4 * 24
    assert profile.active_capacity == 4 * 24 - 4 - batch.stats.preemptions


def test_first_tokens_that_are_dropped():
    """Guards against capacity below zero: rows aborted while their prefill is in flight have no token of it."""
    rollouts = engine(max_slots=8, run_ahead=2, capture=False)
    rollouts.generate(PROMPTS[:1], GREEDY)
    widths = []

    def abort_the_refill(module, inputs, output):
        widths.append(output.shape[1])
        if widths[-1] > 1 and len(widths) > 1:
            for prompt in range(7, 15):
                rollouts.abort(prompt)

    hook = MODEL.model.norm.register_forward_hook(abort_the_refill)
    prompts = [[index, 3] for index in range(15)]
    try:
        stops = tuple(range(zoo.VOCAB_SIZE))
        settings = [SamplingConfig(max_new_tokens=20, stop_token_ids=stops if i < 7 else ()) for i in range(15)]
        batch = rollouts.generate(prompts, settings)
    finally:
        hook.remove()
    refill = widths.index(14, 1)
    assert set(widths[1:refill]) == {1}
    assert [len(completion.token_ids) for completion in batch.completions[8:]] == [0] * 7
    profile = profile_of(batch)
    assert batch.stats.decode_steps > 0
    assert profile.productive_tokens < 15
    assert profile.active_capacity == 0


def test_a_fallback_is_decode_as_a_whole(clock):
    """Guards against the time of a fallback counted to reading the prompts."""
    rollouts = engine(character_tokenizer(), fallback="generate")
    clock.charge(MODEL.model.norm, "forward", 1)
    clock.charge(rollouts.tokenizer, "decode", 1000)
    MODEL.generation_config.no_repeat_ngram_size = 2
    try:
        batch = rollouts.generate(PROMPTS, GREEDY)
    finally:
        MODEL.generation_config.no_repeat_ngram_size = None
    assert batch.stats.route == "generate"
    profile = profile_of(batch)
    assert profile.decode_ms == pytest.approx(1e3 * BUDGET)
    assert profile.postprocessing_ms == pytest.approx(1e6 * len(PROMPTS))
    assert (profile.prefill_forwards, profile.active_capacity) == (0, 0)
