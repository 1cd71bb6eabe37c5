"""`liveroll sweep`: the routes and `auto` compared on workloads, into a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from liveroll.config import RolloutConfig
from liveroll.config_checks import check_whole
from liveroll.errors import ConfigError
from liveroll.planning.costs_file import CostsFile, read_costs
from liveroll.tools.checkpoint import load_checkpoint
from liveroll.tools.sweep_result import AUTO, AUTO_PADDED, CONTENDERS, TOLERANCE, SweepResult, write_sweep
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
        repeats: how often each route is timed.
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
    """Compare the routes and write what was found.

    Raises:
        ConfigError: the model or the costs cannot be used, or the file cannot be written to.
        PromptError: a workload cannot be read or run.
        LiverollError: as `sweep` raises.
    """
    workloads = read_workloads(options.workloads)
    costs = read_costs(options.costs)
    if not options.out.parent.is_dir():
        raise ConfigError(f"cannot write to {options.out}: there is no folder {options.out.parent}")
    model = load_checkpoint(options.model, options.dtype, options.device).model
    result = sweep_model(model, workloads, costs, options, console)
    write_sweep(options.out, result)
    return result


def sweep_model(
    model: Any, workloads: tuple[Workload, ...], costs: CostsFile, options: SweepOptions, console: Console
) -> SweepResult:
    """Compare the routes on a model that is loaded already.

    Args:
        model: the model.
        workloads: the prompts of each call.
        costs: what `options.costs` holds.
        options: the rest.
        console: where the progress bar is shown.
    """
    from liveroll.tools.reference import Reference
    from liveroll.tools.sweep import sweep

    slots = options.slots or max(len(workload.lengths) for workload in workloads)
    checking = None if options.check == 0 else Reference(options.check, options.check_tokens)
    calls = len(workloads) * len(CONTENDERS) * (1 + len(options.budgets) * options.repeats)
    with _bar(console, calls) as tick:
        cases = sweep(
            model,
            workloads,
            options.budgets,
            options.costs,
            config=RolloutConfig(max_slots=slots, capture=options.capture, compile=options.compile, fuse=options.fuse),
            repeats=options.repeats,
            reference=checking,
            tick=tick,
        )
    settings = {
        "new_tokens": list(options.budgets),
        "repeats": options.repeats,
        "slots": slots,
        "checked_prompts": options.check,
        "checked_tokens": options.check_tokens,
        "capture": options.capture,
        "compile": options.compile,
        "fuse": options.fuse,
    }
    origin = asdict(costs.origin)
    return SweepResult(origin, asdict(costs.coefficients), list(costs.points), settings, cases)


def show_sweep(result: SweepResult, console: Console) -> None:
    """Print the time of every route on every workload, and how near `auto` came to the best."""
    table = Table(box=None, padding=(0, 2, 0, 0), title="Median ms of a call", title_justify="left")
    table.add_column("workload", no_wrap=True)
    table.add_column("new", justify="right")
    for name in CONTENDERS:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_column("auto took")
    table.add_column("auto / best", justify="right")
    table.add_column("without packed", justify="right")
    for case in result.cases:
        best = case.best()
        times = [
            f"[bold]{entry.median_ms:.1f}[/bold]" if name == best else f"{entry.median_ms:.1f}"
            for name, entry in case.results.items()
        ]
        ratios = [_coloured(case.ratio(AUTO)), _coloured(case.ratio(AUTO_PADDED))]
        table.add_row(case.workload, str(case.new_tokens), *times, case.results[AUTO].taken, *ratios)
    console.print(table)
    for name in (AUTO, AUTO_PADDED):
        numbers = result.summary()[name]
        console.print(
            f"{name}: within 5% of the best route in {numbers['within 5%']} of {numbers['cases']} cases; at worst "
            f"{numbers['worst ratio']:.3f} times its time ({numbers['worst case']}); routes taken: "
            f"{', '.join(numbers['routes taken'])}",
            highlight=False,
        )
    agreement = result.summary()["agreement"]
    if agreement is not None:
        console.print(f"tokens equal to those of each prompt alone: {agreement:.2%} at worst", highlight=False)


def _coloured(ratio: float) -> str:
    return f"[{'green' if ratio <= TOLERANCE else 'red'}]{ratio:.3f}[/]"


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar of calls, told what is run next."""
    progress = Progress(
        TextColumn("sweeping"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[what]}"),
        TimeRemainingColumn(),
        console=console,
    )
    begun = 0
    with progress:
        bar = progress.add_task("", total=total, what="")

        def tick(what: str) -> None:
            nonlocal begun
            progress.update(bar, completed=begun, what=what)
            begun += 1

        yield tick
        progress.update(bar, completed=total, what="")
