"""`liveroll sweep`: the routes and `auto` compared on workloads, into a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from liveroll.config import RolloutConfig
from liveroll.config_checks import check_whole
from liveroll.errors import ConfigError
from liveroll.planning.costs_file import CostsFile, read_costs
from liveroll.tools.checkpoint import load_checkpoint
from liveroll.tools.outputs import check_output
from liveroll.tools.sweep_file import write_sweep
from liveroll.tools.sweep_result import Case, SweepResult
from liveroll.tools.workloads import Workload, read_workloads


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """What `liveroll sweep` was asked to do.

    Args:
        model: a checkpoint folder, the id of a model on the Hub, or `tiny`.
        costs: file of costs.
        workloads: `seed`, or a file of workloads.
        new_tokens: the budgets, separated by commas.
        out: the file to write.
        repeats: how often each route is timed, at most.
        seconds: what all of it may take; None for no limit.
        slots: rows that run side by side; None for the prompts of the largest workload.
        check: prompts of each workload whose tokens are checked; None for all.
        check_tokens: first tokens of each that are checked; None for all.
        capture: whether decode steps are captured.
        compile: whether they are compiled.
        fuse: whether projections of one input are one product in them; moves the weights side by side.
        dtype: `auto` (as stored), `float32`, `bfloat16` or `float16`.
        device: `auto` (a GPU if there is one) or a torch device such as `cuda:1`.

    Raises:
        ConfigError: a number is out of range.
    """

    model: str
    costs: Path
    workloads: str
    new_tokens: str
    out: Path
    repeats: int = 5
    seconds: int | None = None
    slots: int | None = None
    check: int | None = None
    check_tokens: int | None = None
    capture: bool | Literal["auto"] = "auto"
    compile: bool = False
    fuse: bool = False
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        check_whole(self, "repeats", low=1)
        check_whole(self, "seconds", low=1, optional=True)
        check_whole(self, "slots", low=1, optional=True)
        check_whole(self, "check", low=0, optional=True)
        check_whole(self, "check_tokens", low=1, optional=True)
        _ = self.budgets

    @property
    def budgets(self) -> tuple[int, ...]:
        """The budgets, ascending and each once."""
        try:
            budgets = sorted({int(part) for part in self.new_tokens.split(",")})
        except ValueError:
            raise ConfigError(
                f"--new-tokens must be whole numbers separated by commas, such as 2,16, not {self.new_tokens!r}"
            ) from None
        if budgets[0] < 1:
            raise ConfigError(f"--new-tokens holds {budgets[0]}; at least one token is generated")
        return tuple(budgets)


def run_sweep(options: SweepOptions, console: Console) -> SweepResult:
    """Compare the routes and write what was found, also where it was interrupted after its first case.

    Raises:
        KeyboardInterrupt: as `sweep_model` raises.
        ConfigError: the model or the costs cannot be used, or the file cannot be written to, or is one of those
            that are read.
        PromptError: a workload cannot be read or run.
        LiverollError: as `sweep` raises.
    """
    check_output(options.out, options.costs, Path(options.workloads))
    workloads = read_workloads(options.workloads)
    costs = read_costs(options.costs)
    model = load_checkpoint(options.model, options.dtype, options.device).model
    result = sweep_model(model, workloads, costs, options, console)
    write_sweep(options.out, result)
    return result


def sweep_model(
    model: Any,
    workloads: tuple[Workload, ...],
    costs: CostsFile,
    options: SweepOptions,
    console: Console,
    *,
    case_seconds: float = 5.0,
    keep: Callable[[Case], None] = lambda case: None,
) -> SweepResult:
    """Compare the routes on a model that is loaded already.

    Args:
        model: the model.
        workloads: the prompts of each call.
        costs: what `options.costs` holds.
        options: the rest.
        console: where the progress bar is shown.
        case_seconds: what the repeats of one workload at one budget may take.
        keep: called with each case that is done.

    Returns:
        What was found; where it was interrupted, of the cases that were done by then.

    Raises:
        KeyboardInterrupt: it was interrupted before any case was done.
        LiverollError: as `sweep` raises.
    """
    from liveroll.tools.reference import Reference
    from liveroll.tools.sweep import sweep

    slots = options.slots or max(len(workload.lengths) for workload in workloads)
    config = RolloutConfig(max_slots=slots, capture=options.capture, compile=options.compile, fuse=options.fuse)
    checking = None if options.check == 0 else Reference(options.check, options.check_tokens)
    count = len(workloads) * len(options.budgets)
    done: list[Case] = []
    interrupted = False
    with _bar(console, count) as (tick, advance):

        def take(case: Case) -> None:
            done.append(case)
            advance()
            keep(case)

        try:
            sweep(
                model,
                workloads,
                options.budgets,
                options.costs,
                config=config,
                repeats=options.repeats,
                case_seconds=case_seconds,
                seconds=math.inf if options.seconds is None else options.seconds,
                reference=checking,
                tick=tick,
                keep=take,
            )
        except KeyboardInterrupt:
            if not done:
                raise
            interrupted = True
    order = [workload.name for workload in workloads]
    cases = sorted(done, key=lambda case: (order.index(case.workload), case.new_tokens))
    if not cases:
        raise ConfigError(f"no case can be run in {options.seconds} s; allow more")
    settings = {
        "new_tokens": list(options.budgets),
        "repeats": options.repeats,
        "case_seconds": case_seconds,
        "seconds": options.seconds,
        "left_out": count - len(cases),
        "interrupted": interrupted,
        "slots": slots,
        "checked_prompts": options.check,
        "checked_tokens": options.check_tokens,
        "capture": options.capture,
        "compile": options.compile,
        "fuse": options.fuse,
    }
    origin = asdict(costs.origin)
    return SweepResult(origin, asdict(costs.coefficients), list(costs.points), settings, cases)


@contextmanager
def _bar(console: Console, total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """A progress bar of cases: one function tells it what is run next, the other that a case is done."""
    progress = Progress(
        TextColumn("sweeping"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[what]}", markup=False),
        TimeRemainingColumn(),
        console=console,
    )
    with progress:
        bar = progress.add_task("", total=total, what="")
        yield lambda what: progress.update(bar, what=what), lambda: progress.update(bar, advance=1)
        progress.update(bar, what="")
