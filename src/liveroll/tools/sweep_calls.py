"""The calls of a sweep: every contender on the prompts of one workload, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from liveroll.engine import RolloutEngine
from liveroll.planning.routes import RoutePlan
from liveroll.sampling_config import SamplingConfig
from liveroll.tools.quiet import QuietHost
from liveroll.tools.reference import Reference
from liveroll.tools.sweep_result import AUTO_PADDED, CONTENDERS, MANUAL, BucketShape, Case, RouteResult
from liveroll.tools.sweep_rounds import LONG_MS, runs_in
from liveroll.tools.workloads import Workload
from liveroll.types import RolloutBatch

_GREEDY = SamplingConfig(
    max_new_tokens=1, min_new_tokens=0, temperature=0, repetition_penalty=1.0, stop_token_ids=(), logprobs=False
)


def changes_for(contender: str) -> dict[str, Any]:
    """What a contender's configuration has that the others' have not."""
    if contender == AUTO_PADDED:
        return {"auto_routes": tuple(route for route in MANUAL if route != "packed")}
    return {"prefill_route": contender}


@dataclass
class Track:
    """One workload, and the engines that run it.

    Attributes:
        workload: its lengths.
        model: the model.
        prompts: drawn for the lengths.
        engines: by contender.
        host: waits for the calls that are timed.
        reference: what tokens are checked against; None checks nothing.
        tick: called before each call with what is about to run.
        cases: done so far, in ascending order of budgets.
    """

    workload: Workload
    model: PreTrainedModel
    prompts: list[list[int]]
    engines: Mapping[str, RolloutEngine]
    host: QuietHost
    reference: Reference | None
    tick: Callable[[str], None]
    cases: list[Case] = field(default_factory=list)
    _expected: dict[int, list[int]] = field(default_factory=dict)

    def open(self, budget: int) -> Case:
        """A case of which nothing has been run: what the costs say of each contender, and which do the same work."""
        plans = {name: engine.plan(self.prompts, _sampling(budget)) for name, engine in self.engines.items()}
        works = {name: _work_of(plan) for name, plan in plans.items()}
        results: dict[str, RouteResult] = {}
        for place, name in enumerate(CONTENDERS):
            before = MANUAL[: min(place, len(MANUAL))]
            same = [other for other in before if works[name] is not None and works[other] == works[name]]
            chosen = plans[name].chosen
            results[name] = RouteResult(chosen.cost_ms, chosen.route, same_as=same[0] if same else "")
        lengths = plans["bucketed"].lengths
        buckets = tuple(
            BucketShape(forward.width or 0, tuple(lengths[index] for index in forward.indices))
            for forward in plans["bucketed"].chosen.forwards
        )
        return Case(self.workload.name, self.workload.lengths, budget, buckets, results)

    def prepare(self, case: Case, budget: int) -> None:
        """Find out what the tokens should be, up to a budget, and run short calls of a case once, untimed."""
        if self.reference is not None:
            self._expected = self.reference.of(self.model, self.prompts, budget)
        for name in runs_in(case):
            if case.results[name].predicted_ms <= LONG_MS:
                self.tick(f"{case.workload}, warm-up, {name}")
                self.engines[name].generate(self.prompts, _sampling(case.new_tokens))

    def call(self, case: Case, name: str) -> None:
        """Time a call of a contender; where something was captured on the way, another one."""
        self.tick(f"{case.workload}, {case.new_tokens} tokens, {name}")
        result = case.results[name]

        def generate() -> tuple[float, int | None, RolloutBatch]:
            return _time(self.engines[name], self.prompts, _sampling(case.new_tokens), self.model.device)

        ms, peak, batch = self.host.run(generate)
        if batch.stats.captures:
            ms, peak, batch = self.host.run(generate)
        result.ms.append(ms)
        result.peak_bytes = None if peak is None else max(result.peak_bytes or 0, peak)
        _note(result, batch)
        if self.reference is not None:
            agreement = self.reference.agreement(self._expected, batch)
            result.agreement = min(agreement, 1.0 if result.agreement is None else result.agreement)

    def close(self, case: Case) -> None:
        """Give the contenders that borrow their times those of the routes that were run, and keep the case."""
        for name, result in case.results.items():
            if result.borrowed:
                own = {key: getattr(result, key) for key in ("predicted_ms", "taken", "same_as", "borrowed")}
                case.results[name] = replace(case.results[result.same_as], **own)
        self.cases.append(case)


def _sampling(budget: int) -> SamplingConfig:
    return replace(_GREEDY, max_new_tokens=budget)


def _work_of(plan: RoutePlan) -> tuple[Any, ...] | None:
    """What a plan runs; None where later admissions are planned for themselves."""
    if plan.rows > len(plan.lengths):
        return None
    forwards = tuple(sorted((tuple(sorted(forward.indices)), forward.width or 0) for forward in plan.chosen.forwards))
    return plan.route == "ordinary", forwards


def _time(
    engine: RolloutEngine, prompts: list[list[int]], sampling: SamplingConfig, device: torch.device
) -> tuple[float, int | None, RolloutBatch]:
    """Milliseconds of a call, the device idle before and after it, and on a GPU the most bytes allocated meanwhile."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    batch = engine.generate(prompts, sampling)
    if on_gpu:
        torch.cuda.synchronize(device)
    ms = (time.perf_counter() - began) * 1e3
    return ms, torch.cuda.max_memory_allocated(device) if on_gpu else None, batch


def _note(result: RouteResult, batch: RolloutBatch) -> None:
    stats = batch.stats
    result.taken = stats.route
    result.prefill_forwards = stats.prefill_forwards
    result.prefill_tokens, result.padded_tokens = stats.prefill_tokens, stats.padded_tokens
    result.decode_steps = stats.decode_steps
