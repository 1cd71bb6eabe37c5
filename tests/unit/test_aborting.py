"""Rows and calls that end before their time: what they have comes back, and what they held serves others."""

from __future__ import annotations

import threading
from collections import deque

import pytest
import zoo
from fake_device import VOCAB, Ending, FakeDevice, ending_of, make_request
from hypothesis import event, given, settings
from hypothesis import strategies as st
from snapshots import Trap, left_as_found

from liveroll import ConfigError, EngineStateError, PromptError, RolloutConfig, RolloutEngine, SamplingConfig
from liveroll.cutoff import Cutoff, Limits
from liveroll.scheduling.pages import PageAllocator
from liveroll.scheduling.plan import Wait
from liveroll.scheduling.scheduler import Scheduler

ROUTES = ("packed", "equal_width", "per_prompt", "ordinary")
MODEL = zoo.build("llama")
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=5)
BUDGET = 12
GREEDY = SamplingConfig(max_new_tokens=BUDGET)
EXPECTED = [tuple(zoo.reference(MODEL, prompt, max_new_tokens=BUDGET)) for prompt in PROMPTS]

each_route = pytest.mark.parametrize("route", ROUTES)


def engine(route="packed", model=MODEL, **settings):
    return RolloutEngine(
        model, config=RolloutConfig(**{"prefill_route": route, "page_size": 4, "max_slots": 2, **settings})
    )


REQUEST = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 9),
        "budget": st.integers(1, 20),
        "stop_token_ids": st.sets(st.integers(0, VOCAB - 1), max_size=1).map(tuple),
        "given": st.lists(st.just(0), max_size=3).map(tuple),
    }
)


@settings(deadline=None, derandomize=True, database=None, max_examples=250)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=8),
    slots=st.integers(1, 4),
    spare=st.integers(0, 8),
    ahead=st.integers(0, 3),
    aborts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 7)), max_size=6),
)
def test_rows_aborted_at_any_moment(requests, slots, spare, ahead, aborts):
    """Guards against an aborted row that loses tokens or pages, ends twice, or whose steps in flight reach others."""
    requests = [make_request(row, **arguments) for row, arguments in enumerate(requests)]
    endings = [ending_of(request) for request in requests]
    allocator = PageAllocator(1 + max(-(-request.longest // 3) for request in requests) + spare)
    scheduler = Scheduler(requests, slots=slots, allocator=allocator, page_size=3)
    device, in_flight, done, named = FakeDevice(3), deque(), [], set()
    step = 0
    while (plan := scheduler.plan()) is not None:
        if not isinstance(plan, Wait):
            in_flight.append((plan, device.run(plan, scheduler)))
        while len(in_flight) > (0 if isinstance(plan, Wait) else ahead):
            done += scheduler.commit(*in_flight.popleft())
        chosen = [requests[row] for at, row in aborts if at == step and row < len(requests)]
        named |= {request.row for request in chosen if request.finish_reason is None}
        done += scheduler.abort(chosen)
        scheduler.check()
        step += 1
    assert not in_flight
    assert sorted(request.row for request in done) == list(range(len(requests)))
    assert allocator.available == allocator.pages - 1
    for request, ending in zip(requests, endings, strict=True):
        if request.row in named:
            count = len(request.tokens)
            expected = Ending(ending.tokens[:count], ending.logprobs[:count], "aborted", None)
        else:
            expected = ending
        assert Ending.reached(request) == expected
    event(f"aborted: {len(named)}, with steps in flight: {bool(named and ahead)}")


def check_partial(completions, expected=EXPECTED):
    """Every completion is the beginning of what it would have come to, and those that ended are whole."""
    for completion, whole in zip(completions, expected, strict=True):
        assert completion.token_ids == whole[: len(completion.token_ids)]
        assert len(completion.logprobs) == len(completion.token_ids)
        assert (completion.finish_reason == "aborted") == (len(completion.token_ids) < len(whole))
        assert completion.stop is None


@pytest.mark.thinned(4)
@each_route
@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("budget", [1, 5, 13, 31, 59])
def test_a_budget_of_tokens_for_the_whole_call(route, budget, ahead):
    """Guards against tokens that are lost at the end, rows out of order, or a call that goes on."""
    rollouts = engine(route, run_ahead=ahead)
    batch = rollouts.generate(PROMPTS, GREEDY, max_total_tokens=budget)
    check_partial(batch.completions)
    assert [completion.prompt_index for completion in batch.completions] == list(range(5))
    assert budget <= batch.stats.new_tokens < budget + 2
    assert sum(len(completion.token_ids) for completion in batch.completions) == batch.stats.new_tokens
    mask = batch.attention_mask[:, batch.response_start_idx :]
    assert mask.sum(1).tolist() == [len(completion.token_ids) for completion in batch.completions]
    assert [completion.token_ids for completion in rollouts.generate(PROMPTS, GREEDY).completions] == EXPECTED


@pytest.mark.parametrize("route", ROUTES[:3])
def test_a_budget_reached_while_the_last_steps_are_collected(route):
    """Guards against steps in flight that are all taken in before the budget is looked at."""
    batch = engine(route, run_ahead=3).generate(PROMPTS[:2], GREEDY, max_total_tokens=19)
    assert batch.stats.new_tokens == 20
    check_partial(batch.completions, EXPECTED[:2])


def test_named_and_ended_meanwhile():
    """Guards against a row that another thread aborts in the moment in which it ends."""
    requests = [make_request(0, 2, 5), make_request(1, 2, 5)]
    cutoff = Cutoff(requests, Limits())
    assert cutoff.abort(0, None) == cutoff.abort(1, 0) == 1
    requests[0].finish_reason = "length"
    assert cutoff.due(1) == [requests[1]]
    assert cutoff.due(1) == []


@each_route
def test_named_twice(route):
    """Guards against a stream that gives a completion once for each time that it was aborted."""
    rollouts = engine(route, max_slots=1)
    stream = rollouts.stream(PROMPTS[:3], GREEDY)
    seen = [next(stream).prompt_index]
    assert rollouts.abort(1) == rollouts.abort(1, 0) == 1
    seen += [completion.prompt_index for completion in stream]
    assert sorted(seen) == [0, 1, 2]


@each_route
def test_a_call_without_time(route):
    """Guards against a call that makes no headway at all, and against rows that were never begun being lost."""
    batch = engine(route).generate(PROMPTS, GREEDY, max_seconds=1e-9)
    check_partial(batch.completions)
    lengths = [len(completion.token_ids) for completion in batch.completions]
    assert sorted(lengths) == [0, 0, 0, 1, 1]
    assert batch.loss_mask.shape == (5, 1)


@each_route
def test_limits_that_are_not_reached(route):
    """Guards against a call cut short of a limit that it keeps."""
    batch = engine(route).generate(PROMPTS, GREEDY, max_seconds=1e9, max_total_tokens=5 * BUDGET)
    assert [completion.token_ids for completion in batch.completions] == EXPECTED


@each_route
def test_limits_of_a_stream(route):
    """Guards against a stream that swallows what it could not finish."""
    completions = sorted(
        engine(route).stream(PROMPTS, GREEDY, max_total_tokens=30), key=lambda completion: completion.prompt_index
    )
    assert 30 <= sum(len(completion.token_ids) for completion in completions) <= 31
    check_partial(completions)


@each_route
def test_a_budget_for_each_prompt(route):
    """Guards against a prompt's own budget counting for the call, or the call's for a prompt."""
    budgets = [SamplingConfig(max_new_tokens=count) for count in (1, 4, 2, 6, 3)]
    batch = engine(route).generate(PROMPTS, budgets, max_total_tokens=1000)
    assert [completion.token_ids for completion in batch.completions] == [
        row[: setting.max_new_tokens] for row, setting in zip(EXPECTED, budgets, strict=True)
    ]
    assert {completion.finish_reason for completion in batch.completions} == {"length"}


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), "3", True])
def test_wrong_limits(wrong):
    """Guards against a limit that is silently no limit."""
    for name in ("max_seconds", "max_total_tokens"):
        for call in (engine().generate, engine().stream):
            with pytest.raises(ConfigError, match=f"^{name} must be "):
                call(PROMPTS, GREEDY, **{name: wrong})


@each_route
def test_aborted_between_completions_of_a_stream(route):
    """Guards against an abort that ends another row, loses its tokens, or is given twice."""
    rollouts = engine(route, max_slots=3)
    budgets = (4, 12, 11, 10, 9)
    # Row 3 is the first to end, while row 1 runs and row 0 waits. The ordinary route gives rows 0 to 2 at once.
    running, waiting = (1, 0) if route != "ordinary" else (3, 4)
    seen = {}
    for completion in rollouts.stream(PROMPTS, [SamplingConfig(max_new_tokens=budget) for budget in budgets]):
        if not seen:
            assert (rollouts.abort(running), rollouts.abort(waiting, 0)) == (1, 1)
            assert rollouts.abort(completion.prompt_index) == 0
        assert completion.prompt_index not in seen
        seen[completion.prompt_index] = completion
    assert sorted(seen) == list(range(5))
    check_partial([seen[row] for row in range(5)], [row[:end] for row, end in zip(EXPECTED, budgets, strict=True)])
    assert {row for row in range(5) if seen[row].finish_reason == "aborted"} == {running, waiting}
    assert seen[waiting].token_ids == ()
    assert len(seen[running].token_ids) == (10 if route != "ordinary" else 0)
    assert [completion.token_ids for completion in rollouts.generate(PROMPTS, GREEDY).completions] == EXPECTED


@each_route
@pytest.mark.parametrize("ahead", [0, 2])
def test_aborted_from_inside_a_call(route, ahead):
    """Guards against an abort that only a stream's reader can make: here a hook does, in the fifth forward."""
    model = zoo.build("llama")
    rollouts = engine(route, model, capture=False, max_slots=8, run_ahead=ahead)
    sampling = SamplingConfig(max_new_tokens=BUDGET, n=2)
    Trap(model.model.layers[1].mlp, 5, lambda: rollouts.abort(1) + rollouts.abort(3, 1) + rollouts.abort(4, 0))
    with left_as_found(model):
        batch = rollouts.generate(PROMPTS, sampling)
    check_partial(batch.completions, [row for row in EXPECTED for _ in range(2)])
    ended = [(c.prompt_index, c.sample_index) for c in batch.completions if c.finish_reason == "aborted"]
    assert ended == [(1, 0), (1, 1), (3, 1), (4, 0)]  # the last of them while it waited


@each_route
def test_aborted_from_another_thread(route):
    """Guards against an abort that needs the thread of the call: the call waits in a forward while it is made."""
    model = zoo.build("llama")
    rollouts = engine(route, model, capture=False)
    made = []

    def abort():
        thread = threading.Thread(target=lambda: made.append(rollouts.abort(0)))
        thread.start()
        thread.join()

    Trap(model.model.layers[1].mlp, 4, abort)
    batch = rollouts.generate(PROMPTS, GREEDY)
    assert made == [1]
    check_partial(batch.completions)
    assert [completion.finish_reason for completion in batch.completions].count("aborted") == 1


@each_route
def test_everything_aborted(route):
    """Guards against a call that waits for rows nobody runs."""
    rollouts = engine(route, max_slots=3)
    sampling = [SamplingConfig(max_new_tokens=count) for count in (3, BUDGET, BUDGET, BUDGET, BUDGET)]
    stream = rollouts.stream(PROMPTS, sampling)
    first = next(stream)
    for row in range(5):
        rollouts.abort(row)
    completions = {first.prompt_index: first} | {completion.prompt_index: completion for completion in stream}
    check_partial([completions[row] for row in range(5)], [EXPECTED[0][:3], *EXPECTED[1:]])


def test_what_cannot_be_aborted():
    """Guards against a typo that aborts nothing, and an abort that waits for the next call."""
    rollouts = engine()
    with pytest.raises(EngineStateError, match="no call is running"):
        rollouts.abort(0)
    stream = rollouts.stream(PROMPTS, GREEDY)
    with pytest.raises(EngineStateError, match="no call is running"):
        rollouts.abort(0)
    next(stream)
    for arguments, name in (((5,), "prompt 5"), ((-1,), "prompt -1"), ((0, 1), "sample 1 of prompt 0")):
        with pytest.raises(PromptError, match=name):
            rollouts.abort(*arguments)
    stream.close()
    with pytest.raises(EngineStateError, match="no call is running"):
        rollouts.abort(0)


def test_a_stream_is_checked_when_it_is_made():
    """Guards against an error that shows only when the stream is read, perhaps in another place or never."""
    rollouts = engine()
    with pytest.raises(PromptError, match="prompt 1 is empty"):
        rollouts.stream([[1], []], GREEDY)
    with pytest.raises(ConfigError, match="2 SamplingConfigs were given for 5 prompts"):
        rollouts.stream(PROMPTS, [GREEDY, GREEDY])
    with pytest.raises(ConfigError, match="no tokenizer"):
        rollouts.stream(PROMPTS, SamplingConfig(max_new_tokens=2, stop="x"))
    open_stream = rollouts.stream(PROMPTS, GREEDY)
    next(open_stream)
    with pytest.raises(EngineStateError, match="still open"):
        rollouts.stream(PROMPTS, GREEDY)
    open_stream.close()


def test_a_stream_draws_what_its_place_among_the_calls_gives_it():
    """Guards against a stream whose random streams depend on when it is read."""
    sampling = SamplingConfig(max_new_tokens=6, temperature=1.5)
    first, second = engine(), engine()
    early = first.stream(PROMPTS[:2], sampling)
    between = first.generate(PROMPTS[:2], sampling).completions
    late = sorted(early, key=lambda completion: completion.prompt_index)
    expected = [second.generate(PROMPTS[:2], sampling).completions for _ in range(2)]
    assert [c.token_ids for c in late] == [c.token_ids for c in expected[0]]
    assert [c.token_ids for c in between] == [c.token_ids for c in expected[1]]


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None])
def test_aborting_by_what_is_no_index(wrong):
    """Guards against True ending prompt 1 or sample 1."""
    rollouts = engine()
    stream = rollouts.stream([[1], [2]], [SamplingConfig(max_new_tokens=count) for count in (2, 30)])
    next(stream)
    with pytest.raises(PromptError, match="prompt_index of abort must be a whole number"):
        rollouts.abort(wrong)
    if wrong is not None:
        with pytest.raises(PromptError, match="sample_index of abort must be a whole number"):
            rollouts.abort(1, wrong)
    (rest,) = stream
    assert (rest.finish_reason, len(rest.token_ids)) == ("length", 30)
