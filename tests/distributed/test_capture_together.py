"""A step that one rank of a tensor-parallel group cannot capture is captured on none of them."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import zoo
from ranks import Ranks, sharded
from rollouts import BUDGET, prompts, tokens
from snapshots import raising
from torch import distributed as dist

from liveroll import (
    CaptureError,
    FusionError,
    KVMemoryError,
    LiverollError,
    RankError,
    RolloutConfig,
    RolloutEngine,
    SamplingConfig,
)
from liveroll.decode import capture
from liveroll.prefill import captured

GREEDY = SamplingConfig(max_new_tokens=BUDGET)
BUDGETS = (2, 2, 4, 6)
"""Of four rows, so that they take a captured step of four, and then one of two."""
SHRINKING = [SamplingConfig(max_new_tokens=budget) for budget in BUDGETS]
ELSEWHERE = "because of another rank of the tensor-parallel group"


class NoRoomError(Exception):
    pass


@contextmanager
def recording(fails):
    """Inside, recording the steps raises for which `fails`, given their number, is true; yields how many there were."""
    record, calls = capture.RecordedSteps.record, []

    def failing(self, step):
        calls.append(step)
        if fails(len(calls)):
            raise NoRoomError("no room for a graph")
        return record(self, step)

    capture.RecordedSteps.record = failing
    try:
        yield calls
    finally:
        capture.RecordedSteps.record = record


def engine_on(rank, **settings):
    config = RolloutConfig(**{"max_slots": 4, "max_length": 40, **settings})
    return RolloutEngine(sharded(rank), config=config, tp_group=dist.group.WORLD)


def rollout(engine, sampling=GREEDY):
    batch = engine.generate(prompts(8), sampling)
    return tokens(batch), batch.stats


def one_rank(rank):
    """Rank 1 cannot record the only step; in the third call a weight has moved, and it can."""
    engine = engine_on(rank)
    seen = []
    with recording(lambda call: rank == 1) as calls:
        for _ in range(2):
            rows, stats = rollout(engine)
            seen.append((rows, stats.replays, stats.eager_reason))
    attempts = len(calls)
    norm = engine._model.model.norm
    norm.weight.data = norm.weight.data.clone()
    rows, stats = rollout(engine)
    seen.append((rows, stats.replays > 0, stats.eager_reason))
    return seen, attempts


def second_step(rank):
    """Rank 0 records the step of four rows, and not that of two, which is taken in the middle of a call."""
    engine = engine_on(rank)
    with recording(lambda call: rank == 0 and call == 2):
        rows, stats = rollout(engine, SHRINKING)
    return rows, stats.replays, stats.eager_reason


def prefill(rank):
    """Rank 1 cannot record the prefill; decode steps it can."""
    decide, captured.no_prefill_capture = captured.no_prefill_capture, lambda config, device_type: None
    try:
        engine = engine_on(rank)
        with recording(lambda call: rank == 1 and call == 1):
            rows, stats = rollout(engine)
    finally:
        captured.no_prefill_capture = decide
    return rows, (stats.prefill_replays, stats.replays > 0), stats.prefill_eager_reason


def must_be(rank):
    """Steps or prefills must be captured, and rank 1 cannot record them at first."""
    seen = []
    for settings in ({"capture": True}, {"prefill_capture": True}):
        engine = engine_on(rank, **settings)
        with recording(lambda call: rank == 1), pytest.raises(CaptureError) as refusal:
            rollout(engine)
        rows, stats = rollout(engine)
        seen.append((str(refusal.value), rows, stats.replays > 0))
    return seen


def hooks(rank):
    """Rank 1 needs hooks in every forward; then steps must be captured."""
    seen = []
    engine = engine_on(rank)
    must = engine_on(rank, capture=True)
    if rank == 1:
        for own in (engine, must):
            own._model.model.norm._hf_hook = None  # as accelerate leaves it
    rows, stats = rollout(engine)
    seen.append((rows, stats.replays, stats.eager_reason))
    with pytest.raises(CaptureError) as refusal:
        rollout(must)
    return seen, str(refusal.value)


def no_memory(rank):
    """Rank 1 has no memory for the pages: when they are made, and when they are taken back after `sleep`."""
    engine = engine_on(rank, kv_tokens=512)
    seen = []
    for name in ("provide", "wake"):
        if rank == 1:
            setattr(engine._decoder._pool, name, raising(KVMemoryError("not free any more")))
        with pytest.raises(LiverollError) as refusal:
            rollout(engine)
        vars(engine._decoder._pool).pop(name, None)
        seen.append((type(refusal.value), str(refusal.value), rollout(engine)[0]))
    return seen


def no_fusion(rank):
    """Projections must be one product, and on rank 1 the memory of one of them is not the model's to move."""
    engine = engine_on(rank, fuse=True)
    if rank == 1:
        weight = engine._model.model.layers[1].self_attn.q_proj.weight
        weight.data = torch.cat([weight.data, weight.data])[: len(weight)]
    with pytest.raises(LiverollError) as refusal:
        rollout(engine)
    if rank == 1:
        weight.data = weight.data.clone()
    return [(type(refusal.value), str(refusal.value), rollout(engine)[0])]


SCENARIOS = {
    "one rank": one_rank,
    "second step": second_step,
    "prefill": prefill,
    "must be": must_be,
    "hooks": hooks,
    "no memory": no_memory,
    "no fusion": no_fusion,
}


def broken(rank, report):
    """Rank 1 fails between two collectives of the step that is captured."""
    engine = engine_on(rank)
    rollout(engine)  # so that the next one begins with the step
    engine.release()
    mlp = engine._model.model.layers[1].mlp
    forward, calls = mlp.forward, []

    def failing(hidden):
        calls.append(hidden.shape)
        if hidden.shape[1] == 1 and rank == 1:
            raise NoRoomError("no room for numbers")
        return forward(hidden)

    mlp.forward = failing
    try:
        rollout(engine)
        report(None)
    except CaptureError as refusal:
        report(str(refusal))


@pytest.fixture(scope="module")
def expected():
    return [zoo.reference(zoo.shared("llama"), row, max_new_tokens=BUDGET) for row in prompts(8)]


def test_a_step_that_one_rank_cannot_record_runs_eagerly_on_all(outcomes, expected):
    """Guards against ranks of which some go on captured, against trying again each call, and against never again."""
    for rank, (seen, attempts) in enumerate(outcomes.of("one rank")):
        assert [rows for rows, *_ in seen] == [expected] * 3
        assert attempts == 1
        for _, replays, reason in seen[:2]:
            assert replays == 0
            assert (ELSEWHERE if rank == 0 else "no room for a graph") in reason
        assert seen[2][1:] == (True, None)


def test_a_step_that_fails_in_the_middle_of_a_call(outcomes, expected):
    """Guards against ranks that agree at the first step of a call only."""
    for rank, (rows, replays, reason) in enumerate(outcomes.of("second step")):
        assert rows == [row[:budget] for row, budget in zip(expected, BUDGETS, strict=True)]
        assert replays == 1
        assert (ELSEWHERE if rank == 1 else "no room for a graph") in reason


def test_a_prefill_that_one_rank_cannot_record_runs_eagerly_on_all(outcomes, expected):
    """Guards against prefills that are filled up on some ranks only, and decode steps that suffer for it."""
    for rank, (rows, replayed, reason) in enumerate(outcomes.of("prefill")):
        assert rows == expected
        assert replayed == (0, True)
        assert (ELSEWHERE if rank == 0 else "no room for a graph") in reason


def test_all_ranks_raise_where_steps_must_be_captured(outcomes, expected):
    """Guards against a rank that raises alone, and against engines that are of no use afterwards."""
    for rank, seen in enumerate(outcomes.of("must be")):
        for refusal, rows, replayed in seen:
            assert (ELSEWHERE if rank == 0 else "no room for a graph") in refusal
            assert (rows, replayed) == (expected, True)


def test_hooks_that_one_rank_needs(outcomes, expected):
    """Guards against one rank that decodes eagerly, or is refused, while the others try to capture."""
    for rank, (((rows, replays, reason),), refusal) in enumerate(outcomes.of("hooks")):
        assert (rows, replays) == (expected, 0)
        for text in (reason, refusal):
            assert ("another rank of the tensor-parallel group needs hooks" if rank == 0 else "accelerate") in text


@pytest.mark.parametrize(
    ("what", "kind", "told"),
    [("no memory", KVMemoryError, "not free any more"), ("no fusion", FusionError, "lies in a larger storage")],
)
def test_what_one_rank_cannot_do_before_the_call_begins(outcomes, expected, what, kind, told):
    """Guards against a rank that raises alone, whose next call the others take for a part of this one."""
    elsewhere = "rank 1 of the tensor-parallel group failed, and so does the call; what it raised says why"
    others, own = outcomes.of(what)
    assert len(others) == len(own) >= 1
    for (other, message, after), (mine, said, same) in zip(others, own, strict=True):
        assert (other, message) == (RankError, elsewhere)
        assert mine is kind
        assert told in said
        assert after == same == expected


def test_all_ranks_leave(outcomes):
    """Guards against engines that keep a rank from leaving its group."""
    assert outcomes.all_ended


def test_a_rank_that_fails_among_collectives_raises_at_once():
    """Guards against a rank whose next collective is taken by the others for its part of the step's."""
    with Ranks(broken) as ranks:
        assert "layers.1" in (message := ranks.report(1))
        assert "other ranks of the tensor-parallel group may be waiting" in message
        # Rank 1 has ended, which ends the wait of the other.
        assert "other ranks of the tensor-parallel group may be waiting" in ranks.report(0)
