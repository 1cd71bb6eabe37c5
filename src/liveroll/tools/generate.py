"""Batch generation from a file of prompts to a file of completions, resumable after any interruption."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from liveroll.config import PrefillRoute, RolloutConfig
from liveroll.sampling_config import SamplingConfig
from liveroll.tools.checkpoint import digest_checkpoint, load_checkpoint, locate_checkpoint
from liveroll.tools.jobs import BadLine, Job, read_jobs, refuse_bad_lines
from liveroll.tools.journal import Fingerprint, Journal, find_resumption
from liveroll.tools.outputs import check_output

if TYPE_CHECKING:
    from liveroll.completion import Completion
    from liveroll.engine import RolloutEngine
    from liveroll.tools.fit import FittedJob

# A call pads its prompts to the longest of them in host memory; this bounds it for a file of any length.
_CALL = 4096


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What `liveroll generate` was asked to do.

    Args:
        model: a checkpoint folder, the id of a model on the Hub, or `tiny`.
        prompts: the prompts file.
        out: the output file.
        sampling: settings of every line that does not set its own; the seed must be given.
        slots: rows that decode side by side, at most.
        route: how prompts are prefilled.
        costs: file of costs that routes are compared with, or None.
        dtype: `auto` (as stored), `float32`, `bfloat16` or `float16`.
        device: `auto` (a GPU if there is one) or a torch device such as `cuda:1`.
        skip_bad: pass over bad lines instead of refusing the file.
        overwrite: start again whatever the output file holds.
    """

    model: str
    prompts: Path
    out: Path
    sampling: SamplingConfig
    slots: int = 32
    route: str = "packed"
    costs: Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    skip_bad: bool = False
    overwrite: bool = False

    @property
    def engine_config(self) -> RolloutConfig:
        """The engine that was asked for.

        Raises:
            ConfigError: `slots` or `route` is not one there is.
        """
        return RolloutConfig(max_slots=self.slots, prefill_route=cast(PrefillRoute, self.route), costs=self.costs)


@dataclass(frozen=True)
class GenerateSummary:
    """What a run did.

    Attributes:
        resumed: rows that an earlier run had written.
        written: rows added.
        skipped: bad lines passed over.
        tokens: tokens generated.
        seconds: wall time of the generation, loading left out.
    """

    resumed: int
    written: int
    skipped: int
    tokens: int
    seconds: float

    def __str__(self) -> str:
        rate = self.tokens / max(self.seconds, 1e-9)
        parts = [f"{self.written} prompts written, {self.tokens:,} tokens in {self.seconds:.1f} s ({rate:,.0f}/s)"]
        if self.resumed:
            parts.append(f"{self.resumed} were there already")
        if self.skipped:
            parts.append(f"{self.skipped} bad lines passed over")
        return "; ".join(parts)


def run_generate(options: GenerateOptions, console: Console) -> GenerateSummary:
    """Generate for every line of the prompts file that has no row yet.

    Rows are written as their prompts finish, each with one write, so that an interruption at any moment loses
    at most the prompts that were running. Run again with the same options, it goes on.

    Args:
        options: what to do.
        console: where the progress bar and the bad lines passed over are shown.

    Raises:
        PromptError: the prompts file has bad lines and `skip_bad` is False; the message lists them all.
        ConfigError: the model cannot be loaded, or the output file cannot be written to, is one of those that
            are read, or belongs to a run with other settings.
        LiverollError: as `RolloutEngine.stream` raises.
    """
    check_output(options.out, options.prompts, *([options.costs] if options.costs else []))
    config = options.engine_config
    file = read_jobs(options.prompts, options.sampling)
    _settle_bad_lines(options, file.bad, console)
    fingerprint = _fingerprint(options, file.sha256)
    ids = {job.index: job.id for job in file.jobs}
    resumption = find_resumption(options.out, fingerprint, ids, overwrite=options.overwrite)
    pending = [job for job in file.jobs if job.index not in resumption.done]
    skipped = len(file.bad)
    if not pending:
        with Journal(options.out, fingerprint, resumption):
            return GenerateSummary(len(resumption.done), 0, skipped, 0, 0.0)

    from liveroll.engine import RolloutEngine
    from liveroll.tools.fit import fit_jobs

    checkpoint = load_checkpoint(options.model, options.dtype, options.device)
    with RolloutEngine(checkpoint.model, checkpoint.tokenizer, config) as engine:
        jobs, unfit = fit_jobs(pending, checkpoint, config, engine.costs.max_tokens)
        _settle_bad_lines(options, unfit, console)
        started = time.perf_counter()
        with Journal(options.out, fingerprint, resumption) as journal:
            tokens = _generate(engine, jobs, journal, console)
        seconds = time.perf_counter() - started
    return GenerateSummary(len(resumption.done), len(jobs), skipped + len(unfit), tokens, seconds)


def _settle_bad_lines(options: GenerateOptions, bad: Sequence[BadLine], console: Console) -> None:
    if not options.skip_bad:
        refuse_bad_lines(options.prompts, bad, "correct the file or give --skip-bad")
    for line in bad:
        console.print(f"passed over line {line.number}: {line.reason}", markup=False, highlight=False)


def _fingerprint(options: GenerateOptions, prompts_sha256: str) -> Fingerprint:
    """Name what decides the rows. Slots, route and device decide how fast they come, so they may change."""
    return {
        "model": locate_checkpoint(options.model),
        "model files (hash)": digest_checkpoint(options.model),
        "prompts file (sha256)": prompts_sha256,
        "dtype": options.dtype,
        "sampling": asdict(options.sampling),
    }


def _generate(engine: RolloutEngine, jobs: Sequence[FittedJob], journal: Journal, console: Console) -> int:
    """Run the jobs, write their rows, and count the tokens."""
    tokens = 0
    with _Bar(console, sum(fitted.sampling.n for fitted in jobs)) as bar:
        for start in range(0, len(jobs), _CALL):
            called = jobs[start : start + _CALL]
            waiting: defaultdict[int, list[Completion]] = defaultdict(list)
            prompts, samplings = [fitted.prompt_ids for fitted in called], [fitted.sampling for fitted in called]
            for completion in engine.stream(prompts, samplings):
                place = completion.prompt_index
                waiting[place].append(completion)
                if len(waiting[place]) == samplings[place].n:
                    journal.write(_row(called[place].job, waiting.pop(place)))
                tokens += len(completion.token_ids)
                bar.advance(tokens)
    return tokens


def _row(job: Job, completions: Sequence[Completion]) -> dict[str, Any]:
    ordered = sorted(completions, key=lambda completion: completion.sample_index)
    return {"index": job.index, "id": job.id, "completions": [_entry(completion) for completion in ordered]}


def _entry(completion: Completion) -> dict[str, Any]:
    entry: dict[str, Any] = {"text": completion.text, "token_ids": completion.token_ids}
    if completion.logprobs is not None:
        # JSON has no infinity and no NaN.
        entry["logprobs"] = [value if math.isfinite(value) else None for value in completion.logprobs]
    told = {name: getattr(completion, name) for name in ("raw_logprobs", "top_logprobs", "kept_tokens")}
    entry |= {name: value for name, value in told.items() if value is not None}
    return {**entry, "finish_reason": completion.finish_reason, "stop": completion.stop}


class _Bar:
    """A progress bar of completions, with the tokens a second so far."""

    def __init__(self, console: Console, total: int) -> None:
        self._progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("completions  {task.fields[rate]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("", total=total, rate=0.0)
        self._started = time.perf_counter()

    def advance(self, tokens: int) -> None:
        rate = tokens / max(time.perf_counter() - self._started, 1e-9)
        self._progress.update(self._task, advance=1, rate=rate)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
