"""Scenarios that both ranks run one after the other in one pair of processes, and what one process makes of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import zoo
from ranks import WORLD, Ranks
from rollouts import BUDGET, tokens

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig

VOCAB_SIZE = 96
"""A multiple of the ranks."""
LEARNING_RATE = 0.5
LENGTHS = ([3, 11, 7, 2, 20], [5, 9])
"""Of the prompts of each rank where ranks have prompts of their own."""
GREEDY = SamplingConfig(max_new_tokens=BUDGET)
SAMPLED = SamplingConfig(max_new_tokens=BUDGET, n=2, temperature=1.0, seed=3)


def build() -> Any:
    """The model that ranks hold together."""
    return zoo.build("llama", vocab_size=VOCAB_SIZE)


def prompts_of(rank: int) -> list[list[int]]:
    return zoo.ragged_prompts(VOCAB_SIZE, rank, LENGTHS[rank])


def batch_of(rank: int) -> torch.Tensor:
    """The rank's training batch `[2, 12]`."""
    return torch.randint(VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(10 + rank))


def engine_of(model: Any, **settings: Any) -> RolloutEngine:
    return RolloutEngine(model, config=RolloutConfig(**{"max_slots": 4, "max_length": 40, **settings}))


def train(model: Any, parameters: Any, batch: torch.Tensor) -> None:
    """One step of gradient descent on the forward of a model or wrapper."""
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, foreach=False)
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def rounds(engine: RolloutEngine, prompts: list[list[int]], step: Callable[[], None]) -> list[Any]:
    """Tokens of a greedy and a sampled rollout, before and after a step."""
    seen = []
    for call in range(2):
        if call:
            step()
        seen.append([tokens(engine.generate(prompts, sampling)) for sampling in (GREEDY, SAMPLED)])
    return seen


def alone(prompts: list[list[int]], batches: list[torch.Tensor]) -> list[Any]:
    """What `rounds` gives in one process that has the whole model, greedy tokens by `model.generate`."""
    model = build()
    engine = engine_of(model)
    seen = rounds(engine, prompts, lambda: train(model.train(), model.parameters(), torch.cat(batches)))
    assert seen[0] != seen[1]
    assert seen[1][0] == [zoo.reference(model.eval(), row, max_new_tokens=BUDGET) for row in prompts]
    return seen


def run_all(scenarios: Mapping[str, Callable[[int], Any]], rank: int, report: Callable[[Any], None]) -> None:
    """Run scenarios and report each, also those that fail."""
    for name, scenario in scenarios.items():
        try:
            outcome = (scenario(rank), None)
        except Exception:
            outcome = (None, traceback.format_exc())
        report((name, *outcome))


class Outcomes:
    """What each rank reported of each scenario.

    Args:
        work: runs the scenarios in each process.
        names: of the scenarios, in their order.
    """

    def __init__(self, work: Callable[..., None], names: list[str]) -> None:
        self._reports: dict[tuple[int, str], tuple[Any, str | None]] = {}
        with Ranks(work) as ranks:
            try:
                for name in names:
                    for rank in range(WORLD):
                        reported, value, failure = ranks.report(rank)
                        assert reported == name
                        self._reports[rank, name] = value, failure
                self.ended = [ranks.ended(rank) for rank in range(WORLD)]
            except TimeoutError:
                self.ended = [False] * WORLD

    def of(self, name: str) -> list[Any]:
        """What each rank made of a scenario; AssertionError where one failed or reported nothing."""
        found = []
        for rank in range(WORLD):
            value, failure = self._reports.get((rank, name), (None, "it reports nothing"))
            assert failure is None, f"rank {rank} failed:\n{failure}"
            found.append(value)
        return found
