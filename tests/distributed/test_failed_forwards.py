"""Models of `fully_shard` after forwards that an exception ended, and ranks that would gather in different ways."""

from __future__ import annotations

import pytest
import torch
from ranks import WORLD
from rollouts import tokens
from scenarios import GREEDY, batch_of, build, engine_of, hooks_of, prompts_of
from test_fully_shard import is_sharded, sharded, tokens_alone
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from liveroll import RankError


def changing(model):
    """A weight of the root, and one of each layer."""
    return [model.lm_head.weight, *(layer.mlp.up_proj.weight for layer in model.model.layers)]


@torch.no_grad()
def negate(weights):
    for weight in weights:
        weight.neg_()


def ended(where, gather):
    """A forward fails on both ranks, weights change as by an optimizer, and a rollout follows."""

    class NoError(Exception):
        pass

    def fail(*_):
        raise NoError

    def scenario(rank):
        model = build()
        first, second = model.model.layers
        register = second.register_forward_pre_hook
        if where == "between modules":
            fully_shard([model.model.norm, model.lm_head])
            register = model.model.norm.register_forward_hook
        sharded(model)
        if where == "gathered ahead":
            register = first.register_forward_pre_hook
            model.set_modules_to_forward_prefetch([first])
            first.set_modules_to_forward_prefetch([second])
        engine = engine_of(model, gather_weights=gather)
        hooks, held = hooks_of(model), changing(model)
        handle = register(fail)
        with pytest.raises(NoError):
            engine.generate(prompts_of(rank), GREEDY) if where == "rollout" else model(input_ids=batch_of(rank))
        handle.remove()
        running = model._get_fsdp_state()._state_ctx.iter_forward_root is not None
        left = is_sharded(model), hooks_of(model) == hooks, running
        negate(held)
        return left, tokens(engine.generate(prompts_of(rank), GREEDY)), is_sharded(model)

    return scenario


def disagreeing(rank):
    """Ranks have other values of `gather_weights`; then both have one."""
    model = sharded(build())
    seen = []
    for values in ((True, False), ("auto", False), (True, "auto")):
        with pytest.raises(RankError) as refusal:
            engine_of(model, gather_weights=values[rank]).generate(prompts_of(rank), GREEDY)
        seen.append((str(refusal.value), refusal.value.ranks))
    # In a mesh of two dimensions a rank hears of the others through each of its groups.
    mesh = dist.init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(RankError) as refusal:
        engine_of(sharded(build(), mesh=mesh), gather_weights=not rank).generate(prompts_of(rank), GREEDY)
    seen.append((str(refusal.value), refusal.value.ranks))
    return seen, tokens(engine_of(model).generate(prompts_of(rank), GREEDY)) == tokens_alone(prompts_of(rank))


SCENARIOS = {
    "rollout": ended("rollout", False),
    "forward": ended("forward", True),
    "forward, layer by layer": ended("forward", False),
    "gathered ahead": ended("gathered ahead", True),
    "between modules": ended("between modules", False),
    "disagreeing": disagreeing,
}


@pytest.fixture(scope="module")
def expected():
    model = build()
    negate(changing(model))
    return [tokens(engine_of(model).generate(prompts_of(rank), GREEDY)) for rank in range(WORLD)]


def test_a_rollout_that_fails_layer_by_layer(outcomes, expected):
    """Guards against the root's weights that stay whole, and into which no step of an optimizer comes any more.

    And against a forward that the trainer's next one takes itself to be a part of.
    """
    for rank, (left, seen, left_again) in enumerate(outcomes.of("rollout")):
        assert left == (True, True, False)
        assert seen == expected[rank]
        assert left_again


@pytest.mark.parametrize("kind", ["forward", "forward, layer by layer", "gathered ahead", "between modules"])
def test_a_forward_of_the_trainer_that_failed(outcomes, expected, kind):
    """Guards against a rollout with what the forward gathered before the weights changed, also of layers to come.

    And against units of several modules that count as begun, and gather nothing.
    """
    for rank, (_, seen, left) in enumerate(outcomes.of(kind)):
        assert seen == expected[rank]
        assert left


def test_ranks_that_gather_in_different_ways(outcomes):
    """Guards against ranks of which one gathers while the other votes, until the timeout of their group."""
    first, second = outcomes.of("disagreeing")
    assert first == second
    seen, works_again = first
    told = "the ranks of the group that holds the weights disagree about RolloutConfig.gather_weights: "
    assert seen == [
        (f"{told}rank 0 has {mine!r}, rank 1 has {theirs!r}", (1,))
        for mine, theirs in ((True, False), ("auto", False), (True, "auto"), (True, False))
    ]
    assert works_again


def test_all_ranks_leave(outcomes):
    """Guards against a rank that is left in a collective."""
    assert outcomes.all_ended
