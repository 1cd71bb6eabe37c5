"""What `liveroll plan` shows: how a call would be routed, and what every route is estimated to cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from liveroll.config import PrefillRoute, RolloutConfig
from liveroll.errors import ConfigError, PromptError
from liveroll.planning.routes import RouteCandidate, RoutePlan
from liveroll.sampling_config import SamplingConfig
from liveroll.tools.checkpoint import load_checkpoint
from liveroll.tools.jobs import read_jobs, refuse_bad_lines

_SHOWN_SHAPES = 4
_TERMS = ("fixed_ms", "token_ms", "attention_ms", "kv_ms", "decode_ms", "cost_ms")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What `liveroll plan` was asked to do.

    Args:
        model: a checkpoint folder, the id of a model on the Hub, or `tiny`.
        prompts: a file of prompts, as `liveroll generate` reads it; either this or `lengths`.
        lengths: tokens of each prompt, separated by commas.
        sampling: settings of every prompt that does not set its own.
        costs: file of measured costs; None for the defaults.
        max_slots: rows that decode side by side, at most.
        route: the configured route.
        dtype: `auto` (as stored), `float32`, `bfloat16` or `float16`.
        device: `auto` (a GPU if there is one) or a torch device.
    """

    model: str
    prompts: Path | None
    lengths: str | None
    sampling: SamplingConfig
    costs: Path | None = None
    max_slots: int = 32
    route: str = "auto"
    dtype: str = "auto"
    device: str = "auto"


def run_plan(options: PlanOptions) -> RoutePlan:
    """Plan a call without running it.

    Raises:
        ConfigError: both or neither of prompts and lengths are given, or the model or costs cannot be used.
        PromptError: the prompts file has bad lines or no prompts, or the lengths are none, or more than the model
            allows.
        LiverollError: as `RolloutEngine.plan` raises.
    """
    if (options.prompts is None) == (options.lengths is None):
        raise ConfigError("give either --prompts or --lengths")
    route = cast(PrefillRoute, options.route)
    config = RolloutConfig(prefill_route=route, max_slots=options.max_slots, costs=options.costs)
    prompts: list[Any] = []
    lengths: list[int] = []
    if options.prompts is not None:
        file = read_jobs(options.prompts, options.sampling)
        refuse_bad_lines(options.prompts, file.bad)
        if not file.jobs:
            raise PromptError(f"{options.prompts} has no prompts")
        prompts, sampling = [job.prompt for job in file.jobs], [job.sampling for job in file.jobs]
    else:
        lengths = _read_lengths(options.lengths or "")
        sampling = [options.sampling] * len(lengths)

    from liveroll.engine import RolloutEngine

    checkpoint = load_checkpoint(options.model, options.dtype, options.device)
    prompts = prompts or _distinct_prompts(lengths, checkpoint.model.config.get_text_config())
    return RolloutEngine(checkpoint.model, checkpoint.tokenizer, config).plan(prompts, sampling)


def describe_plan(plan: RoutePlan) -> dict[str, Any]:
    """A plan as plain values, for JSON."""
    candidates = [
        {
            "route": candidate.route,
            "forwards": [{"rows": rows, "width": width} for rows, width in _shapes(candidate)],
            **{term: getattr(candidate, term) for term in _TERMS},
            "obstacle": candidate.obstacle,
        }
        for candidate in plan.candidates
    ]
    return {
        "route": plan.route,
        "configured": plan.configured,
        "rows": plan.rows,
        "lengths": list(plan.lengths),
        "decode_steps": plan.decode_steps,
        "candidates": candidates,
        "costs": asdict(plan.costs),
        "geometry": asdict(plan.geometry),
    }


def show_plan(plan: RoutePlan, console: Console) -> None:
    """Print a plan as a table, the route taken marked."""
    table = Table(box=None, padding=(0, 2, 0, 0), title="Estimated costs in ms", title_justify="left")
    table.add_column("route", no_wrap=True)
    table.add_column("rows x width")
    for term in _TERMS:
        table.add_column(term.removesuffix("_ms").replace("cost", "total"), justify="right", no_wrap=True)
    for candidate in sorted(plan.candidates, key=lambda candidate: candidate.cost_ms):
        taken = candidate.route == plan.route
        table.add_row(
            f"> {candidate.route}" if taken else f"  {candidate.route}",
            _describe_shapes(candidate),
            *(f"{getattr(candidate, term):.1f}" for term in _TERMS),
            style="bold" if taken else "",
        )
    console.print(table)
    for candidate in plan.candidates:
        if candidate.obstacle is not None:
            console.print(f"auto may not take {candidate.route}: {candidate.obstacle}", highlight=False)
    first = "" if plan.rows == len(plan.lengths) else f"; {len(plan.lengths)} are admitted first and planned here"
    how = "auto takes" if plan.configured == "auto" else "the configuration says"
    console.print(
        f"{how} {plan.route}: {plan.rows} rows{first}, {sum(plan.lengths)} prompt tokens, "
        f"{plan.decode_steps} decode steps",
        highlight=False,
    )


def _read_lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise PromptError(f"--lengths must be whole numbers separated by commas, not {text!r}") from None
    if min(lengths) < 1:
        raise PromptError(f"--lengths holds {min(lengths)}; every prompt needs at least one token")
    return lengths


def _distinct_prompts(lengths: Sequence[int], text_config: Any) -> list[list[int]]:
    """Prompts of these lengths, no two of them equal: those would share a forward."""
    vocab_size, limit = text_config.vocab_size, getattr(text_config, "max_position_embeddings", None)
    if limit is not None and max(lengths) > limit:
        raise PromptError(f"--lengths holds {max(lengths)}, and the model's max_position_embeddings is {limit}")
    before: Counter[int] = Counter()
    prompts = []
    for length in lengths:
        prompt, number = [0] * length, before[length]
        for place in range(length):
            number, prompt[place] = divmod(number, vocab_size)
            if not number:
                break
        before[length] += 1
        prompts.append(prompt)
    return prompts


def _shapes(candidate: RouteCandidate) -> Sequence[tuple[int, int | None]]:
    return [(len(forward.indices), forward.width) for forward in candidate.forwards]


def _describe_shapes(candidate: RouteCandidate) -> str:
    """Rows and width of the forwards, equal ones counted together and the most frequent first."""
    counted = Counter(_shapes(candidate)).most_common()
    parts = [
        (f"{count} of " if count > 1 else "") + (f"{rows} packed" if width is None else f"{rows} x {width}")
        for (rows, width), count in counted[:_SHOWN_SHAPES]
    ]
    left = sum(count for _, count in counted[_SHOWN_SHAPES:])
    return ", ".join(parts) + (f", {left} more" if left else "")
