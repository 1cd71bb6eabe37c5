"""Ranks that hold the same model share a call's work, and return what one rank would return for all prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from ranks import Crew
from torch import distributed as dist

from liveroll import ConfigError, LiverollError, RankError, RolloutConfig, RolloutEngine, SamplingConfig

WORLD = 4
SLOTS = 4
STOP = 7

KEPT: dict[str, Any] = {}
"""What a rank keeps from task to task: engines, and groups of some of the ranks."""


@pytest.fixture(scope="module")
def crew():
    with Crew(WORLD) as crew:
        crew.run(make_groups)
        yield crew


def prompts_of(counts: tuple[int, ...], seed: int = 0) -> list[list[list[int]]]:
    """Draw so many prompts for each rank, of mixed lengths."""
    drawn = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed, [3 + 5 * (index % 4) for index in range(sum(counts))])
    return [[drawn.pop() for _ in range(count)] for count in counts]


def engine_with(**settings: Any) -> RolloutEngine:
    return RolloutEngine(zoo.build("llama"), config=RolloutConfig(**{"max_slots": SLOTS, **settings}))


def flat(per_rank: list[list[Any]]) -> list[Any]:
    return [entry for own in per_rank for entry in own]


def told(batch) -> list[tuple[Any, ...]]:
    """All that is the same wherever a completion was run."""
    return [
        (c.prompt_index, c.sample_index, c.token_ids, c.finish_reason, c.stop, c.stream, c.prompt_ids, c.sampled_mask)
        for c in batch.completions
    ]


def split(batch, counts: tuple[int, ...]) -> list[list[tuple[Any, ...]]]:
    """What one rank returned for all prompts, as each of several ranks should have returned it for its own."""
    parts, first = [], 0
    for count in counts:
        own = [entry for entry in told(batch) if first <= entry[0] < first + count]
        parts.append([(entry[0] - first, *entry[1:]) for entry in own])
        first += count
    return parts


# What ranks do.


def make_groups(rank: int) -> None:
    KEPT["world"] = dist.group.WORLD
    KEPT["pairs"] = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    KEPT["first two"] = dist.new_group([0, 1])
    KEPT["alone"] = [dist.new_group([one]) for one in range(WORLD)][rank]


def kept_engine(**settings: Any) -> RolloutEngine:
    key = f"engine {sorted(settings.items())}"
    if key not in KEPT:
        KEPT[key] = engine_with(**settings)
    return KEPT[key]


def share(rank: int, prompts: list[Any], sampling: Any, settings: dict[str, Any], call: dict[str, Any]) -> Any:
    """Generate for the rank's own prompts: what is told, the tensors, and tokens sampled here."""
    engine = kept_engine(**settings)
    own = sampling[rank] if isinstance(sampling, list) else sampling
    group = KEPT[call.get("group", "world")]
    batch = engine.generate(prompts[rank], own, group=group, gather=call.get("gather", "own"))
    tensors = (batch.input_ids.tolist(), batch.loss_mask.tolist(), batch.response_logprobs)
    return told(batch), tensors, batch.stats.new_tokens, batch.stats.prompts, len(batch.sampling)


def attempt(rank: int, work: Callable[..., Any], *arguments: Any) -> tuple[str, str, Any]:
    """The kind, message and ranks of the error that a task ends with."""
    try:
        work(rank, *arguments)
    except LiverollError as error:
        return type(error).__name__, str(error), getattr(error, "ranks", None)
    return "none", "", None


# What they should do.

GREEDY = SamplingConfig(max_new_tokens=12, seed=0, stop_token_ids=(STOP,))
SAMPLED = SamplingConfig(max_new_tokens=12, temperature=1.0, n=3, seed=5, stop_token_ids=(STOP,))
COUNTS = (5, 0, 9, 2)


@pytest.mark.parametrize("balance", ["queue", "static"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("gather", ["own", "all"])
def test_as_one_rank_with_all_prompts(crew, sampling, balance, gather):
    """Guards against tokens that depend on who ran a row, and completions in another order or of another's prompts."""
    prompts = prompts_of(COUNTS)
    prompts[3][1] = prompts[0][0]  # equal prompts on two ranks draw from different streams
    alone = engine_with().generate(flat(prompts), sampling)
    reports = crew.run(share, prompts, sampling, {"balance": balance}, {"gather": gather})
    expected = split(alone, COUNTS) if gather == "own" else [told(alone)] * WORLD
    assert [seen for seen, *_ in reports] == expected
    assert {entry[3] for entry in told(alone)} == {"stop", "length"}
    for rank, (_, (ids, loss, logprobs), _, count, settings) in enumerate(reports):
        assert count == COUNTS[rank]
        assert settings == (COUNTS[rank] if gather == "own" else sum(COUNTS))
        assert len(ids) == len(loss) == len(logprobs) == len(expected[rank])
        if gather == "all":
            assert ids == alone.input_ids.tolist()
            assert loss == alone.loss_mask.tolist()
            torch.testing.assert_close(logprobs, alone.response_logprobs)
    new = [tokens for _, _, tokens, *_ in reports]
    assert sum(new) == alone.stats.new_tokens
    if balance == "queue":
        assert min(new) > 0, "the rank without prompts did nothing for the others"
    else:
        assert new == [sum(sum(entry[7]) for entry in own) for own in split(alone, COUNTS)]
