"""Compiled steps of models that ranks hold or compute in parts."""

from __future__ import annotations

import pytest
import scenarios
import zoo
from ranks import WORLD
from rollouts import tokens
from scenarios import GREEDY, VOCAB_SIZE, engine_of, prompts_of
from test_fully_shard import is_sharded, sharded
from test_tensor_parallel import parallelized, planned
from torch._dynamo.backends.registry import lookup_backend

from liveroll import CompileError
from liveroll.decode import feeding


def prepare(rank):
    """Compile up to where code is written for the device, which would take a minute each time."""
    feeding.inductor = lookup_backend("aot_eager")


def build():
    return zoo.build("llama", vocab_size=VOCAB_SIZE, num_hidden_layers=1)


def rollouts(engine, model, rank):
    """Tokens of two rows, before and after the weights change where they are, and the last batch."""
    rows = prompts_of(rank)[:2]
    before = tokens(engine.generate(rows, GREEDY))
    model.model.norm.weight.data.neg_()
    batch = engine.generate(rows, GREEDY)
    return [before, tokens(batch)], batch.stats


def compiled(model, rank):
    engine = engine_of(model, compile=True)
    seen, stats = rollouts(engine, model, rank)
    compilations = len(engine.compilations)
    engine.shutdown()
    return seen, (compilations, stats.uncompiled_reason, stats.eager_reason, stats.replays > 0)


def together(rank):
    return compiled(parallelized(rank, model=build()), 0)


def in_parts(rank):
    model = sharded(build())
    return *compiled(model, rank), is_sharded(model)


def by_plan(rank):
    """Several rows, and then one, for which code of its own is compiled; torch 2.13 cannot do that for DTensors."""
    model = planned(rank)
    engine = engine_of(model, compile=True)
    several, _ = rollouts(engine, model, 0)
    try:
        single = tokens(engine.generate(prompts_of(0)[:1], GREEDY))
    except CompileError as refusal:
        single = str(refusal)
    engine.shutdown()
    return several, single


SCENARIOS = {"together": together, "in parts": in_parts, "by plan": by_plan}


@pytest.fixture(scope="module")
def expected():
    seen = []
    for rank in range(WORLD):
        model = build()
        rows, _ = rollouts(engine_of(model), model, rank)
        assert rows[0] != rows[1]
        seen.append(rows)
    return seen


def test_layers_that_ranks_compute_together(outcomes, expected):
    """Guards against compiled code without the collectives of its layers, or with weights of before."""
    for seen, how in outcomes.of("together"):
        assert seen == expected[0]
        assert how == (1, None, None, True)


def test_weights_that_ranks_hold_in_parts(outcomes, expected):
    """Guards against compiled code that keeps the weights gathered for an earlier call."""
    for rank, (seen, how, left) in enumerate(outcomes.of("in parts")):
        assert seen == expected[rank]
        assert how == (1, None, None, True)
        assert left


def test_layers_that_are_divided_by_a_plan(outcomes):
    """Guards against ranks of which one is refused and the others go on."""
    model = scenarios.build()
    expected, _ = rollouts(engine_of(model), model, 0)
    (several, single), second = outcomes.of("by plan")
    assert (several, single) == second
    assert several == expected
    assert single == expected[1][:1] or "cannot be compiled" in single


def test_all_ranks_leave(outcomes):
    """Guards against compiled code that keeps a rank from leaving its group."""
    assert outcomes.all_ended
