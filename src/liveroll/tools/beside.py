"""Engines that differ in their route alone, on one set of pages and captured steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from liveroll.engine import RolloutEngine


def beside(engine: RolloutEngine, **changes: Any) -> RolloutEngine:
    """An engine of another route or of other costs, over the pages and captured steps of one; the two take turns.

    Args:
        engine: the engine.
        changes: fields of its configuration that decide how prompts are prefilled.
    """
    other = RolloutEngine(engine._model, engine.tokenizer, replace(engine.config, **changes))
    other._decoder = engine._decoder
    other._rollout.run_over(engine._decoder)
    return other
