"""Models whose weights `fully_shard` leaves to two ranks in parts roll out as in one process."""

from __future__ import annotations

import pytest
import torch
from ranks import WORLD
from rollouts import tokens
from scenarios import (
    GREEDY,
    VOCAB_SIZE,
    alone,
    batch_of,
    build,
    engine_of,
    hooks_of,
    prompts_of,
    roll_out,
    train,
)
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from liveroll import ConfigError, GatherError, PromptError, RankError, UnsupportedModelError


class Wrapper(nn.Module):
    """Holds a model as DDP does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, **arguments):
        return self.module(**arguments)


def sharded(model, root=None, mesh=None):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(root or model, mesh=mesh)


def is_sharded(model):
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def rolled_out(gather, wrap=None):
    def scenario(rank):
        model = build()
        outer = Wrapper(model) if wrap else model
        sharded(model, outer)
        if wrap == "compile":
            outer = torch.compile(outer, backend="eager")
        engine = engine_of(outer, gather_weights=gather)
        rolled = roll_out(engine, prompts_of(rank), lambda: train(outer.train(), model.parameters(), batch_of(rank)))
        return rolled, is_sharded(model)

    return scenario


def unequal(rank):
    """Rank 1 has no prompts, then both have, then rank 0 has none; routes differ, and one rank is refused."""
    model = sharded(build())
    seen = []
    for gather in (True, False):
        for route in ("packed", "ordinary"):
            engine = engine_of(model, gather_weights=gather, prefill_route=route, max_slots=2)
            for call in range(3):
                rows = [] if call == 2 * (1 - rank) else prompts_of(rank)
                batch = engine.generate(rows, GREEDY)
                seen.append(tokens(batch) == (tokens_alone(rows)))
            try:
                engine.generate([[VOCAB_SIZE]] if rank else prompts_of(0), GREEDY)
                seen.append(rank == 0)
            except PromptError:
                seen.append(rank == 1)
    return seen, is_sharded(model)


def registered(rank):
    """Trainer has `generate` gather the root's weights; rank 1 has nothing to hand to it, rank 0 two chunks."""
    model = build()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=True)
    register_fsdp_forward_method(model, "generate")
    generate, rows, seen = model.generate, [] if rank else prompts_of(0), []
    for gather in (True, False):
        for route in ("ordinary", "generate"):
            fallback = {"fallback": route} if route == "generate" else {"prefill_route": route}
            # The engine knows no such setting, which forbids nothing here.
            model.generation_config.no_repeat_ngram_size = GREEDY.max_new_tokens if route == "generate" else None
            batch = engine_of(model, gather_weights=gather, **fallback).generate(rows, GREEDY)
            seen.append(tokens(batch) == tokens_alone(rows) and batch.stats.route in (route, "none"))
    return seen, is_sharded(model), model.generate == generate


def tokens_alone(rows):
    return tokens(engine_of(build()).generate(rows, GREEDY)) if rows else []


def failing(rank):
    """A hook of the trainer fails in the first forward of a layer, and is removed."""

    class NoError(Exception):
        pass

    def fail(*_):
        raise NoError

    model = sharded(build())
    before = hooks_of(model)
    engine = engine_of(model)
    handle = model.model.layers[0].mlp.register_forward_pre_hook(fail)
    with pytest.raises(NoError):
        engine.generate(prompts_of(rank), GREEDY)
    handle.remove()
    left = is_sharded(model) and hooks_of(model) == before
    return left, tokens(engine.generate(prompts_of(rank), GREEDY)), is_sharded(model) and hooks_of(model) == before


def stale(rank):
    """Weights change after a forward that leaves the root's unsharded."""
    changed = build()
    changed.model.norm.weight.data.neg_()
    expected = tokens(engine_of(changed).generate(prompts_of(rank), GREEDY))
    seen = []
    for gather in (True, False):
        model = sharded(build())
        norm = model.model.norm.weight
        with torch.no_grad():
            model(input_ids=batch_of(rank))
            assert not is_sharded(model)
            norm.neg_()
        seen.append(tokens(engine_of(model, gather_weights=gather).generate(prompts_of(rank), GREEDY)) == expected)
    return seen


def short(rank):
    """Rank 1 has little memory."""
    from liveroll.distributed import weights

    free = weights.free_bytes
    weights.free_bytes = lambda device: 1000 if rank else free(device)
    try:
        model = sharded(build())
        batch = engine_of(model, gather_weights="auto").generate(prompts_of(rank), GREEDY)
        with pytest.raises(GatherError) as refusal:
            engine_of(model, gather_weights=True).generate(prompts_of(rank), GREEDY)
    finally:
        weights.free_bytes = free
    return tokens(batch), batch.stats.eager_reason, str(refusal.value)


def grouped(rank):
    """Both ranks share a queue."""
    model = sharded(build())
    batch = engine_of(model, gather_weights=True).generate(prompts_of(rank), GREEDY, group=dist.group.WORLD)
    with pytest.raises(GatherError):
        engine_of(model, gather_weights=False).generate(prompts_of(rank), GREEDY, group=dist.group.WORLD)
    return tokens(batch), is_sharded(model)


def alone_refused(rank):
    """An argument that rank 1 alone gives is refused, in a call of its own and in one over a group."""
    seen = []
    for gather in (True, False):
        engine = engine_of(sharded(build()), gather_weights=gather)
        for odd, group in (({"max_seconds": -1.0}, None), ({"gather": "some"}, dist.group.WORLD)):
            try:
                engine.generate(prompts_of(rank), GREEDY, group=group, **(odd if rank else {}))
                seen.append("none")
            except (ConfigError, RankError, GatherError) as error:
                seen.append(type(error).__name__)
        seen.append(tokens(engine.generate(prompts_of(rank), GREEDY)) == tokens_alone(prompts_of(rank)))
    return seen


def late(rank):
    """Rank 1 comes to a call over the group when rank 0 has given up."""
    model = sharded(build())
    engine = engine_of(model, gather_weights=True, rank_timeout=1.0)
    store = dist.group.WORLD.get_group_store()
    if rank:
        store.wait(["gave up"])
    with pytest.raises(RankError) as missing:
        engine.generate(prompts_of(rank), GREEDY, group=dist.group.WORLD)
    store.set("gave up", "")
    engine = engine_of(model, gather_weights=True)
    return str(missing.value), tokens(engine.generate(prompts_of(rank), GREEDY, group=dist.group.WORLD))


def refused(rank):
    model = build()
    engine = engine_of(sharded(model, Wrapper(model)), gather_weights=False)
    with pytest.raises(GatherError) as obstacle:
        engine.generate(prompts_of(rank), GREEDY)
    with pytest.raises(UnsupportedModelError) as stream:
        engine.stream(prompts_of(rank), GREEDY)
    with pytest.raises(UnsupportedModelError) as predecessor:
        engine_of(FullyShardedDataParallel(build(), device_id=torch.device("cpu")))
    with pytest.raises(ConfigError) as costs:
        engine_of(model, costs="auto", prefill_route="auto")
    return [str(refusal.value) for refusal in (obstacle, stream, predecessor, costs)]


SCENARIOS = {
    "gathered": rolled_out(True),
    "layer by layer": rolled_out(False),
    "wrapped": rolled_out("auto", "wrapper"),
    "compiled": rolled_out("auto", "compile"),
    "unequal": unequal,
    "registered": registered,
    "failing": failing,
    "stale": stale,
    "short": short,
    "grouped": grouped,
    "alone refused": alone_refused,
    "late": late,
    "refused": refused,
}


@pytest.fixture(scope="module")
def expected():
    return [alone(prompts_of(rank), [batch_of(0), batch_of(1)]) for rank in range(WORLD)]


@pytest.mark.parametrize("kind", ["gathered", "wrapped", "compiled"])
def test_gathered_weights(outcomes, expected, kind):
    """Guards against weights of before the step, forwards that reshard them, and weights left gathered."""
    for rank, (rolled, left) in enumerate(outcomes.of(kind)):
        assert rolled.seen == expected[rank]
        assert rolled.as_captured == (True, None)
        assert left


def test_weights_gathered_layer_by_layer(outcomes, expected):
    """Guards against ranks that run different numbers of forwards, and captured steps without gathering hooks."""
    for rank, (rolled, left) in enumerate(outcomes.of("layer by layer")):
        assert rolled.seen == expected[rank]
        replayed, eager_reason = rolled.as_captured
        assert (rolled.captures, replayed) == (0, False)
        assert "gather" in eager_reason
        assert left


def test_ranks_with_unequal_or_no_prompts(outcomes):
    """Guards against a rank that ends, or is refused, while others wait for its part of the weights."""
    for seen, left in outcomes.of("unequal"):
        assert seen == [True] * 16
        assert left


def test_generate_that_gathers_weights(outcomes):
    """Guards against ranks that gather whenever one of them calls `model.generate`, as Trainer has it."""
    assert outcomes.of("registered") == [([True] * 4, True, True)] * WORLD


def test_a_failed_call_leaves_the_weights_and_hooks(outcomes, expected):
    """Guards against weights that stay gathered, and hooks that stay away, after an exception."""
    for rank, (left, seen, left_again) in enumerate(outcomes.of("failing")):
        assert left
        assert seen == expected[rank][0][0]
        assert left_again


def test_memory_is_asked_for_on_every_rank(outcomes, expected):
    """Guards against one rank that gathers while another has not the memory for it."""
    for rank, (seen, eager_reason, refusal) in enumerate(outcomes.of("short")):
        assert seen == expected[rank][0][0]
        assert "gather" in eager_reason
        assert "sharded by fully_shard" in refusal


def test_weights_that_a_forward_left_unsharded_are_gathered_anew(outcomes):
    """Guards against a rollout with what an earlier forward gathered."""
    assert outcomes.of("stale") == [[True, True]] * WORLD


def test_ranks_that_share_a_queue(outcomes, expected):
    """Guards against a queue over weights that are not at hand, and a wait that no vote ends."""
    for rank, (seen, left) in enumerate(outcomes.of("grouped")):
        assert seen == expected[rank][0][0]
        assert left


def test_an_argument_that_one_rank_refuses(outcomes):
    """Guards against a rank that raises before it gathers, and leaves the others in that."""
    first, second = outcomes.of("alone refused")
    assert first == ["none", "RankError", True, "none", "GatherError", True]
    assert second == ["ConfigError", "ConfigError", True, "ConfigError", "GatherError", True]


def test_a_rank_that_does_not_come_to_the_queue(outcomes, expected):
    """Guards against gathering before all are there, which only the timeout of the group would end."""
    for rank, (missing, seen) in enumerate(outcomes.of("late")):
        assert missing.startswith("rank 1 did not call generate with the group within 1 s")
        assert seen == expected[rank][0][0]


def test_refusals(outcomes):
    """Guards against calls that hang, and against silence about what would not hang."""
    for obstacle, stream, predecessor, costs in outcomes.of("refused"):
        assert "Wrapper" in obstacle
        assert "use generate" in stream
        assert "fully_shard" in predecessor
        assert "liveroll calibrate" in costs


def test_all_ranks_leave(outcomes):
    """Guards against engines that keep a rank from leaving its group."""
    assert outcomes.all_ended
