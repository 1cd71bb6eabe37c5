"""Rollouts of a small engine, compared with `model.generate` prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zoo
from transformers import PreTrainedModel

from liveroll import RolloutBatch, RolloutConfig, RolloutEngine, SamplingConfig

BUDGET = 6


def prompts(width: int, rows: int = 4, seed: int = 0) -> list[list[int]]:
    """Draw `rows` random prompts of `width` tokens."""
    return zoo.ragged_prompts(zoo.VOCAB_SIZE, seed, [width] * rows)


def engine_of(model: Any, **settings: Any) -> RolloutEngine:
    """Make an engine of four slots, in which a call of four equal rows captures one step."""
    return RolloutEngine(model, config=RolloutConfig(**{"max_slots": 4, **settings}))


def tokens(batch: RolloutBatch) -> list[list[int]]:
    return [list(completion.token_ids) for completion in batch.completions]


def check(
    engine: RolloutEngine, model: PreTrainedModel, rows: Sequence[list[int]], budget: int = BUDGET, **settings: Any
) -> RolloutBatch:
    """Generate greedily and compare with `model.generate`; `settings` are fields that both have under one name."""
    stop = settings.pop("stop_token_ids", None)
    batch = engine.generate(list(rows), SamplingConfig(max_new_tokens=budget, stop_token_ids=stop, **settings))
    if stop:
        settings |= {"eos_token_id": list(stop), "pad_token_id": 0}
    expected = [zoo.reference(model, row, max_new_tokens=budget, **settings) for row in rows]
    assert tokens(batch) == expected
    return batch
