"""Ranks that compute layers together make one call: where it is not the same on all of them, all raise and say why."""

from __future__ import annotations

from dataclasses import replace

import pytest
import zoo
from ranks import sharded
from rollouts import tokens
from scenarios import GREEDY, engine_of
from test_tensor_parallel import parallelized
from torch import distributed as dist

from liveroll import ConfigError, LiverollError, RolloutConfig, RolloutEngine, SamplingConfig

PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, 0, [3, 11, 7])
OTHERS = [[1, *PROMPTS[0][1:]], *PROMPTS[1:]]
SAMPLED = SamplingConfig(max_new_tokens=6, temperature=1.0)


def complaint(call):
    """The kind of the error that a call ends with, its message, and the ranks that it names."""
    try:
        call()
    except LiverollError as error:
        return type(error).__name__, str(error), getattr(error, "ranks", None)
    return "none", "", None


def together(rank, **settings):
    return RolloutEngine(sharded(rank), config=RolloutConfig(max_slots=4, **settings), tp_group=dist.group.WORLD)


def calls(rank):
    """Calls of which rank 1 makes another, and each time one afterwards that both make."""
    engine = together(rank)

    def with_odd(odd, **even):
        arguments = {"prompts": PROMPTS, "sampling": GREEDY, **even}
        seen = complaint(lambda: engine.generate(**(arguments | odd if rank else arguments)))
        return seen, tokens(engine.generate(PROMPTS, GREEDY))

    short, longer = (engine.generate(PROMPTS, GREEDY, max_total_tokens=limit) for limit in (4, 7))
    return {
        "prompts": with_odd({"prompts": OTHERS}),
        "number": with_odd({"prompts": PROMPTS[:2]}),
        "seed": with_odd({"sampling": replace(GREEDY, seed=4)}),
        "budget": with_odd({"sampling": replace(GREEDY, max_new_tokens=3)}),
        "settings": with_odd({"sampling": [GREEDY, GREEDY, replace(GREEDY, n=2)]}),
        "completions": with_odd({"continue_from": longer}, prompts=None, continue_from=short),
        "prefix": with_odd({"response_prefix": [5, 6]}),
        "limit": with_odd({"max_total_tokens": 5}),
        "refused": with_odd({"prompts": [[1], [500]]}),
        "time": with_odd({"max_seconds": 3.0}),
        "time of both": with_odd({}, max_seconds=3.0),
    }


def streams(rank):
    """Streams that differ, and one that does not."""
    engine = together(rank)
    seen = complaint(lambda: engine.stream(OTHERS if rank else PROMPTS, GREEDY))
    return seen, sorted((c.prompt_index, c.token_ids) for c in engine.stream(PROMPTS, GREEDY))


def engines(rank):
    """Engines of which rank 1 has another."""
    generation = together(rank)
    if rank:
        generation._model.generation_config.top_k = 3
    return {
        "engine seed": complaint(lambda: together(rank, seed=rank).generate(PROMPTS, SAMPLED)),
        "route": complaint(
            lambda: together(rank, prefill_route="per_prompt" if rank else "packed").generate(PROMPTS, GREEDY)
        ),
        "memory": complaint(lambda: together(rank, kv_tokens=256 + 16 * rank).generate(PROMPTS, GREEDY)),
        "generation configuration": complaint(lambda: generation.generate(PROMPTS, SAMPLED)),
    }


def groups(rank):
    """Groups of other ranks than those that the layers are divided among."""
    alone = [dist.new_group([one]) for one in range(2)]
    model = parallelized(rank)
    return [
        complaint(lambda: RolloutEngine(model, tp_group=alone[rank])),
        complaint(lambda: RolloutEngine(model, tp_group=alone[1 - rank])),
        complaint(lambda: RolloutEngine(model, tp_group=dist.new_group([0, 1])).generate([[1, 2]], GREEDY)),
        complaint(lambda: RolloutEngine(zoo.build("llama"), tp_group=alone[rank]).generate([[1, rank]], SAMPLED)),
    ]


SCENARIOS = {"calls": calls, "streams": streams, "engines": engines, "groups": groups}


@pytest.fixture(scope="module")
def expected():
    return tokens(engine_of(zoo.build("llama")).generate(PROMPTS, GREEDY))


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("prompts", "the prompts: rank 0 has 3 of 21 tokens ("),
        ("number", "the prompts: rank 0 has 3 of 21 tokens ("),
        ("seed", "SamplingConfig.seed: rank 0 has None, rank 1 has 4"),
        ("budget", "SamplingConfig.max_new_tokens: rank 0 has "),
        ("settings", "the settings of each prompt: rank 0 has "),
        ("completions", "the completions to continue: rank 0 has "),
        ("prefix", "the prefixes of responses: rank 0 has "),
        ("limit", "max_total_tokens: rank 0 has None, rank 1 has 5"),
    ],
)
def test_calls_that_differ(outcomes, expected, what, told):
    """Guards against tokens of which each rank computed a part from something else, or a rank left in a collective."""
    (mine, after), (theirs, other) = (seen[what] for seen in outcomes.of("calls"))
    assert mine == theirs
    kind, message, ranks = mine
    assert (kind, ranks) == ("RankError", (1,))
    assert message.startswith(f"the ranks of the tensor-parallel group disagree about {told}")
    assert after == other == expected


@pytest.mark.parametrize(("what", "told"), [("refused", "PromptError"), ("time", "ConfigError")])
def test_a_call_that_one_rank_refuses(outcomes, expected, what, told):
    """Guards against a rank that raises alone, and leaves the others in the layers that they compute with it."""
    (theirs, after), ((kind, message, _), other) = (seen[what] for seen in outcomes.of("calls"))
    assert kind == told
    failed = f"rank 1 of the tensor-parallel group failed, and so does the call: {told}: {message}"
    assert theirs == ("RankError", failed, (1,))
    assert after == other == expected


def test_a_call_that_all_ranks_refuse(outcomes):
    """Guards against ranks that run out of time at different steps, and errors told as another rank's."""
    for seen in outcomes.of("calls"):
        (kind, message, _), _ = seen["time of both"]
        assert (kind, "max_total_tokens" in message) == ("ConfigError", True)


def test_streams_that_differ(outcomes, expected):
    """Guards against an agreement that only `generate` knows of."""
    (mine, after), (theirs, other) = outcomes.of("streams")
    assert mine == theirs
    assert mine[1].startswith("the ranks of the tensor-parallel group disagree about the prompts")
    assert after == other == [(index, tuple(row)) for index, row in enumerate(expected)]


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("engine seed", "RolloutConfig.seed: rank 0 has 0, rank 1 has 1"),
        ("route", "RolloutConfig.prefill_route: rank 0 has 'packed', rank 1 has 'per_prompt'"),
        ("generation configuration", "the model's generation configuration: rank 0 has "),
    ],
)
def test_engines_that_differ(outcomes, what, told):
    """Guards against settings by which ranks sample, plan or capture differently."""
    mine, theirs = (seen[what] for seen in outcomes.of("engines"))
    assert mine == theirs
    assert mine[1].startswith(f"the ranks of the tensor-parallel group disagree about {told}")


def test_engines_that_may_differ(outcomes):
    """Guards against ranks refused for unequal memory, of which all take what the least has."""
    assert [seen["memory"][0] for seen in outcomes.of("engines")] == ["none", "none"]


def test_groups_that_do_not_match_the_mesh(outcomes):
    """Guards against votes among other ranks than those that a layer is computed by."""
    for rank, (alone, absent, same, one) in enumerate(outcomes.of("groups")):
        divided = "the model's layers are divided among ranks 0 and 1; leave tp_group out"
        assert alone[:1] == (ConfigError.__name__,)
        assert alone[1].startswith(f"tp_group has rank {rank}, and {divided}")
        assert absent[0] == "ConfigError"
        assert "this rank is not in tp_group" in absent[1]
        assert (same[0], one[0]) == ("none", "none")


def test_all_ranks_leave(outcomes):
    """Guards against a rank that waits for another's part of an agreement."""
    assert outcomes.all_ended
