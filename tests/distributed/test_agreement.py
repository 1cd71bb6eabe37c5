"""Ranks that hold parts of one model capture together, or wait for one another for good."""

from __future__ import annotations

import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import zoo
from ranks import Ranks, sharded
from rollouts import BUDGET, engine_of, prompts, tokens
from torch import distributed as dist

from liveroll import EngineStateError, RolloutConfig, RolloutEngine, SamplingConfig
from liveroll.distributed.agreement import any_rank, least_of

GREEDY = SamplingConfig(max_new_tokens=BUDGET)
LONG = SamplingConfig(max_new_tokens=24)


def move(model):
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = weight.data.clone()


def together(rank, report):
    """A parameter moves on rank 1 alone; then both shut down and leave the group."""
    model = sharded(rank)
    engine = RolloutEngine(model, config=RolloutConfig(max_slots=4), tp_group=dist.group.WORLD)
    seen = []
    for call in range(4):
        if call == 2 and rank == 1:
            move(model)
        seen.append((tokens(engine.generate(prompts(8), GREEDY)), engine.captures))
    kv = engine.memory().kv
    reasons = engine.recapture_reasons
    engine.shutdown()
    freed = engine.memory().total
    seen.append((tokens(engine.generate(prompts(8), GREEDY)), engine.captures))
    engine.shutdown()
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    left = group() is None
    with pytest.raises(EngineStateError) as refusal:
        engine.generate(prompts(8), GREEDY)
    engine.shutdown()
    report((seen, reasons, kv, freed, left, str(refusal.value)))


def alone(rank, report):
    """The same with each rank deciding for itself."""
    from liveroll.decode import attempt, decoder

    attempt.any_rank = decoder.any_rank = decoder.least_of = lambda own, group, device: own
    decoder.failing_together = lambda group, device: nullcontext()
    model = sharded(rank)
    engine = RolloutEngine(model, config=RolloutConfig(max_slots=4), tp_group=dist.group.WORLD)
    engine.generate(prompts(8), GREEDY)
    report("before")
    if rank == 1:
        move(model)
    engine.generate(prompts(8), GREEDY)
    report("after")
    time.sleep(1000)  # a rank that ends would end the other's wait with an error


def with_less_memory(rank, report):
    """Rank 1 has less memory free, and rank 0 none to spare in the second call."""
    from liveroll.kv import pool

    free = SimpleNamespace(tokens=96 if rank == 1 else 1000)
    pool.free_bytes = lambda device: free.tokens * 256 * 2  # half of it may be taken
    engine = RolloutEngine(sharded(rank), config=RolloutConfig(max_slots=4, page_size=4), tp_group=dist.group.WORLD)
    batch = engine.generate(prompts(20), LONG)
    report((tokens(batch), batch.stats.preemptions, engine.memory().kv))
    dist.barrier()
    dist.destroy_process_group()


def released_alone(rank, report):
    """Rank 1 alone releases what it made for a long call; the next one is short on both."""
    engine = RolloutEngine(sharded(rank), config=RolloutConfig(max_slots=4), tp_group=dist.group.WORLD)
    engine.generate(prompts(300), GREEDY)
    if rank == 1:
        engine.release()
    report((tokens(engine.generate(prompts(8), GREEDY)), engine.memory().kv))
    dist.barrier()
    dist.destroy_process_group()


def expected(rows, budget):
    model = zoo.shared("llama")
    return [zoo.reference(model, row, max_new_tokens=budget) for row in rows]


def test_a_parameter_moved_on_one_rank_is_captured_again_on_both():
    """Guards against a rank that captures, and so runs a step, which the others never join.

    And against an engine that keeps the group after the trainer destroyed it, which aborts some processes at their end.
    """
    with Ranks(together) as ranks:
        for rank in (0, 1):
            seen, reasons, kv, freed, left, refusal = ranks.report(rank)
            assert [rows for rows, _ in seen] == [expected(prompts(8), BUDGET)] * 5
            assert [captures for _, captures in seen] == [1, 1, 2, 2, 3]
            (reason,) = reasons
            if rank == 1:
                assert reason.startswith("model.layers.1.mlp.down_proj.weight changed its address from ")
            else:
                assert reason == "another rank of the tensor-parallel group had to capture again"
            assert kv > 0
            assert freed == 0
            assert left
            assert "has been destroyed" in refusal
        assert ranks.ended(0)
        assert ranks.ended(1)


def test_without_agreement_the_ranks_hang():
    """Guards against the test above passing for another reason than the agreement."""
    with Ranks(alone) as ranks:
        assert ranks.report(0) == ranks.report(1) == "before"
        assert ranks.report(0) == "after"
        with pytest.raises(TimeoutError):
            ranks.report(1, patience=5)


def test_ranks_with_unequal_memory_plan_the_same_steps():
    """Guards against pages by each rank's own free memory: one rank would put rows back, and the other go on."""
    with Ranks(with_less_memory) as ranks:
        first, second = ranks.report(0), ranks.report(1)
        assert first == second
        rows, preemptions, kv = first
        assert rows == expected(prompts(20), 24)
        assert preemptions > 0
        assert kv == (96 + 4) * 256
        assert ranks.ended(0)
        assert ranks.ended(1)


def test_a_rank_that_released_what_the_others_keep_plans_the_same_steps():
    """Guards against more pages on ranks that once made a longer call: prompts kept there are run again elsewhere."""
    with Ranks(released_alone) as ranks:
        first, second = ranks.report(0), ranks.report(1)
        assert first == second
        assert first[0] == expected(prompts(8), BUDGET)
        assert ranks.ended(0)
        assert ranks.ended(1)


def test_without_a_group_a_rank_decides_for_itself():
    """Guards against a collective where there is nobody to answer."""
    cpu = torch.device("cpu")
    assert any_rank(True, None, cpu)
    assert not any_rank(False, None, cpu)
    assert least_of(7, None, cpu) == 7
    engine_of(zoo.shared("llama")).generate(prompts(3), GREEDY)
