"""Every route on the same workloads: what each takes, and how near `auto` comes to the best of them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from liveroll.config import RolloutConfig
from liveroll.engine import RolloutEngine
from liveroll.errors import ConfigError, PromptError
from liveroll.model.unwrap import unwrap
from liveroll.tools.beside import beside
from liveroll.tools.quiet import QuietHost
from liveroll.tools.reference import Reference
from liveroll.tools.sweep_calls import Track, changes_for
from liveroll.tools.sweep_result import CONTENDERS, Case
from liveroll.tools.sweep_rounds import expected_ms, leave_out, next_round, runs_in
from liveroll.tools.workloads import Workload, draw_prompts

_WAITING = 1.0
"""What may go into waiting for a quiet host, of the time that calls take."""


def sweep(
    model: Any,
    workloads: Sequence[Workload],
    new_tokens: Sequence[int],
    costs: Path,
    *,
    config: RolloutConfig | None = None,
    repeats: int = 5,
    case_seconds: float = 5.0,
    seconds: float = math.inf,
    reference: Reference | None = None,
    tick: Callable[[str], None] = lambda what: None,
    keep: Callable[[Case], None] = lambda case: None,
) -> list[Case]:
    """Run every workload by every route, in one process and interleaved.

    The routes share one set of pages and captured steps. Of each workload every route is warmed up once, at the
    smallest budget; then every route is called, in random order, and in further rounds those that may be the fastest.
    Each call waits until the host is quiet, for as long as earlier ones took at most. Calls of more than a
    second are not made where shorter ones have told enough, as `sweep_rounds` says. Stop tokens are off, so that all
    routes generate the same number of tokens.

    Args:
        model: the model, as an engine is given it.
        workloads: the prompts of each call, as many as the slots at most, or refills are planned as well.
        new_tokens: the budgets.
        costs: file of costs measured for this model and device.
        config: of the engines; its route and costs are not used.
        repeats: how often each is timed, at most.
        case_seconds: what the repeats of one workload at one budget may take.
        seconds: what all may take, repeats too. Cases that are expected to exceed it are left out; small budgets come
            first.
        reference: what to check the tokens against; None checks nothing.
        tick: called before each call with what is about to run.
        keep: called with each case that is done.

    Returns:
        The cases that were run, in the order of the workloads, then of budgets.

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
    began = time.perf_counter()
    vocab_size = own.config.get_text_config().vocab_size
    with RolloutEngine(model, config=base) as engine:
        engines = {name: beside(engine, **changes_for(name)) for name in CONTENDERS}
        host = QuietHost(_WAITING)
        tracks = [
            Track(workload, own, draw_prompts(workload.lengths, vocab_size, seed=place), engines, host, reference, tick)
            for place, workload in enumerate(workloads)
        ]
        for budget in sorted(set(new_tokens)):
            for track in tracks:
                case = track.open(budget)
                leave_out(case, track.cases)
                takes_ms = sum(expected_ms(case, track.cases, name) for name in runs_in(case))
                if time.perf_counter() - began + takes_ms / 1e3 > seconds:
                    continue
                if not track.cases:
                    track.prepare(case, max(new_tokens))
                left = seconds - (time.perf_counter() - began)
                _run(case, track, repeats, min(case_seconds, left))
                track.close(case)
                keep(case)
    return [case for track in tracks for case in track.cases]


def _run(case: Case, track: Track, repeats: int, seconds: float) -> None:
    """Call the contenders of a case in rounds, each in another random order."""
    names, turn = runs_in(case), 0
    ends = math.inf
    while names:
        for name in random.Random(turn).sample(names, len(names)):
            track.call(case, name)
        turn += 1
        ends = min(ends, time.perf_counter() + seconds)
        names = next_round(case, repeats, (ends - time.perf_counter()) * 1e3)


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
