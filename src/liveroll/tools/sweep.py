"""Every route on the same workloads: what each takes, and how near `auto` comes to the best of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from liveroll.config import RolloutConfig
from liveroll.engine import RolloutEngine
from liveroll.errors import ConfigError, PromptError
from liveroll.model.unwrap import unwrap
from liveroll.sampling_config import SamplingConfig
from liveroll.tools.beside import beside
from liveroll.tools.reference import Reference
from liveroll.tools.sweep_result import AUTO, AUTO_PADDED, CONTENDERS, MANUAL, BucketShape, Case, RouteResult
from liveroll.tools.workloads import Workload, draw_prompts
from liveroll.types import RolloutBatch

_GREEDY = SamplingConfig(
    max_new_tokens=1, min_new_tokens=0, temperature=0, repetition_penalty=1.0, stop_token_ids=(), logprobs=False
)


def sweep(
    model: Any,
    workloads: Sequence[Workload],
    new_tokens: Sequence[int],
    costs: Path,
    *,
    config: RolloutConfig | None = None,
    repeats: int = 5,
    reference: Reference | None = None,
    tick: Callable[[str], None] = lambda what: None,
) -> list[Case]:
    """Run every workload by every route, in one process and interleaved.

    The routes share one set of pages and captured steps. Of each workload every route is warmed up once, at the
    smallest budget; each repeat then takes the routes in another random order. Stop tokens are off, so that all
    routes generate the same number of tokens.

    Args:
        model: the model, as an engine is given it.
        workloads: the prompts of each call, as many as the slots at most, or refills are planned as well.
        new_tokens: the budgets.
        costs: file of costs measured for this model and device.
        config: of the engines; its route and costs are not used.
        repeats: how often each is timed.
        reference: what to check the tokens against; None checks nothing.
        tick: called before each call with what is about to run.

    Raises:
        ConfigError: the costs are of something else, or there is nothing to run.
        PromptError: a workload is longer than the model allows.
        LiverollError: as `RolloutEngine.generate` raises.
    """
    own = unwrap(model)
    if not workloads or not new_tokens or min(new_tokens) < 1 or repeats < 1:
        raise ConfigError("a sweep needs a workload, a budget of at least one token, and at least one repeat")
    check_lengths(workloads, max(new_tokens), own)
    base = config or RolloutConfig(max_slots=max(len(workload.lengths) for workload in workloads))
    longest = max(max(workload.lengths) for workload in workloads) + max(new_tokens)
    base = replace(base, prefill_route="auto", costs=costs, max_length=longest)
    cases: list[Case] = []
    with RolloutEngine(model, config=base) as engine:
        engines = {name: beside(engine, **changes_for(name)) for name in CONTENDERS}
        for place, workload in enumerate(workloads):
            prompts = draw_prompts(workload.lengths, own.config.get_text_config().vocab_size, seed=place)
            expected = None if reference is None else reference.of(own, prompts, max(new_tokens))
            for name in CONTENDERS:
                tick(f"{workload.name}, warm-up, {name}")
                engines[name].generate(prompts, replace(_GREEDY, max_new_tokens=min(new_tokens)))
            for budget in new_tokens:
                sampling = replace(_GREEDY, max_new_tokens=budget)
                case = _open_case(workload, budget, engines, prompts, sampling)
                for repeat in range(repeats):
                    for name in random.Random(repeat).sample(CONTENDERS, len(CONTENDERS)):
                        tick(f"{workload.name}, {budget} tokens, {name}")
                        result = case.results[name]
                        with _timed(own.device, result):
                            batch = engines[name].generate(prompts, sampling)
                        _note(result, batch)
                        if reference is not None and expected is not None:
                            agreement = reference.agreement(expected, batch)
                            result.agreement = min(agreement, 1.0 if result.agreement is None else result.agreement)
                cases.append(case)
    return cases


def check_lengths(workloads: Sequence[Workload], budget: int, model: PreTrainedModel) -> None:
    """Refuse workloads that the model has no positions for.

    Raises:
        PromptError: naming the workload.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for workload in workloads:
        longest = max(workload.lengths)
        if limit is not None and longest + budget > limit:
            raise PromptError(
                f"workload {workload.name!r} has a prompt of {longest} tokens, together with {budget} new ones "
                f"{longest + budget}, and the model's max_position_embeddings is {limit}; leave it out or generate less"
            )


def changes_for(contender: str) -> dict[str, Any]:
    """What a contender's configuration has that the others' have not."""
    if contender == AUTO_PADDED:
        return {"auto_routes": tuple(route for route in MANUAL if route != "packed")}
    return {"prefill_route": contender}


def _open_case(
    workload: Workload,
    budget: int,
    engines: dict[str, RolloutEngine],
    prompts: list[list[int]],
    sampling: SamplingConfig,
) -> Case:
    plan = engines[AUTO].plan(prompts, sampling)
    candidates = {candidate.route: candidate for candidate in plan.candidates}
    results = {str(route): RouteResult(predicted_ms=candidates[route].cost_ms) for route in MANUAL}
    results[AUTO] = RouteResult(predicted_ms=plan.chosen.cost_ms)
    results[AUTO_PADDED] = RouteResult(predicted_ms=engines[AUTO_PADDED].plan(prompts, sampling).chosen.cost_ms)
    buckets = tuple(
        BucketShape(forward.width or 0, tuple(plan.lengths[index] for index in forward.indices))
        for forward in candidates["bucketed"].forwards
    )
    return Case(workload.name, workload.lengths, budget, buckets, results)


@contextmanager
def _timed(device: torch.device, result: RouteResult) -> Iterator[None]:
    """Time the block, the device idle before and after it, and watch its memory."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    yield
    if on_gpu:
        torch.cuda.synchronize(device)
    result.ms.append((time.perf_counter() - began) * 1e3)
    if on_gpu:
        result.peak_bytes = max(result.peak_bytes or 0, torch.cuda.max_memory_allocated(device))


def _note(result: RouteResult, batch: RolloutBatch) -> None:
    stats = batch.stats
    result.taken = stats.route
    result.prefill_forwards = stats.prefill_forwards
    result.prefill_tokens, result.padded_tokens = stats.prefill_tokens, stats.padded_tokens
    result.decode_steps = stats.decode_steps
