"""Scenarios that all ranks run one after the other in one set of processes, and what one process makes of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import zoo
from ranks import PATIENCE, WORLD, Ranks
from rollouts import BUDGET, tokens
from torch import distributed as dist

from liveroll import RolloutConfig, RolloutEngine, RolloutStats, SamplingConfig

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


@dataclass(frozen=True)
class RolledOut:
    """What a rank makes of its rounds.

    Attributes:
        seen: as `rounds` gives it.
        captures: of the rounds.
        stats: of one more call.
        kv: bytes of KV pages at the end.
    """

    seen: list[Any]
    captures: int
    stats: RolloutStats
    kv: int

    @property
    def as_captured(self) -> tuple[bool, str | None]:
        """Whether captured steps ran in the last call, and why not all were."""
        return self.stats.replays > 0, self.stats.eager_reason


def roll_out(engine: RolloutEngine, prompts: list[list[int]], step: Callable[[], None]) -> RolledOut:
    """Rounds, one more call, and the end of the engine."""
    seen, captures = rounds(engine, prompts, step), engine.captures
    stats = engine.generate(prompts, GREEDY).stats
    kv = engine.memory().kv
    engine.shutdown()
    return RolledOut(seen, captures, stats, kv)


def hooks_of(model: Any) -> list[Any]:
    """All forward hooks of a model's modules."""
    return [(list(m._forward_hooks.values()), list(m._forward_pre_hooks.values())) for m in model.modules()]


def alone(prompts: list[list[int]], batches: list[torch.Tensor]) -> list[Any]:
    """What `rounds` gives in one process that has the whole model, greedy tokens by `model.generate`."""
    model = build()
    engine = engine_of(model)
    seen = rounds(engine, prompts, lambda: train(model.train(), model.parameters(), torch.cat(batches)))
    assert seen[0] != seen[1]
    assert seen[1][0] == [zoo.reference(model.eval(), row, max_new_tokens=BUDGET) for row in prompts]
    return seen


def _work(rank: int, report: Callable[[Any], None], name: str) -> None:
    """Run the scenarios of a module and report each, also those that fail."""
    module = import_module(name)
    if prepare := getattr(module, "prepare", None):
        prepare(rank)
    for scenario_name, scenario in module.SCENARIOS.items():
        try:
            outcome = (scenario(rank), None)
        except Exception:
            outcome = (None, traceback.format_exc())
        report((scenario_name, *outcome))
    dist.destroy_process_group()


class Outcomes:
    """What each rank reported of each scenario.

    Args:
        module: has the scenarios in `SCENARIOS`, by name, each a function of the rank. If it has `prepare`, each
            process calls that first; if it has `PROCESSES`, there are so many; if it has `PATIENCE`, a scenario may
            take so many seconds.
    """

    def __init__(self, module: Any) -> None:
        self.ranks = range(getattr(module, "PROCESSES", WORLD))
        patience = getattr(module, "PATIENCE", PATIENCE)
        self._reports: dict[tuple[int, str], tuple[Any, str | None]] = {}
        with Ranks(_work, len(self.ranks), module.__name__) as ranks:
            try:
                for name in module.SCENARIOS:
                    for rank in self.ranks:
                        reported, value, failure = ranks.report(rank, patience)
                        assert reported == name
                        self._reports[rank, name] = value, failure
                self.all_ended = all(ranks.ended(rank) for rank in self.ranks)
            except TimeoutError:
                self.all_ended = False

    def of(self, name: str) -> list[Any]:
        """What each rank made of a scenario; AssertionError where one failed or reported nothing."""
        found = []
        for rank in self.ranks:
            value, failure = self._reports.get((rank, name), (None, "it reports nothing"))
            assert failure is None, f"rank {rank} failed:\n{failure}"
            found.append(value)
        return found
