"""What a sweep found, as a table in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from liveroll.tools.sweep_result import AUTO, AUTO_PADDED, CONTENDERS, MARKS, TOLERANCE, Case, SweepResult

_NAME = 24  # letters of a workload's name that the table has room for


def show_sweep(result: SweepResult, console: Console) -> None:
    """Print the time of every route on every workload, and how near `auto` came to the best."""
    table = Table(box=None, padding=(0, 2, 0, 0), title="Least ms of a call", title_justify="left")
    table.add_column("workload", max_width=_NAME, overflow="ellipsis", no_wrap=True)
    table.add_column("new", justify="right")
    for name in CONTENDERS:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_column("auto took")
    for name in ("auto / best", "without packed", "noise"):
        table.add_column(name, justify="right")
    for case in result.cases:
        best = case.best()
        times = [f"[bold]{case.label(name)}[/bold]" if name == best else case.label(name) for name in case.results]
        ratios = [_coloured(case, AUTO), _coloured(case, AUTO_PADDED)]
        taken = case.results[AUTO].taken
        table.add_row(escape(case.workload), str(case.new_tokens), *times, taken, *ratios, f"{case.noise:.1%}")
    console.print(table)
    console.print(MARKS, highlight=False)
    for name in (AUTO, AUTO_PADDED):
        numbers = result.summary()[name]
        console.print(
            f"{name}: within 5% of the best route in {numbers['within 5%']} of {numbers['cases']} cases; at worst "
            f"{numbers['worst ratio']:.3f} times its time ({numbers['worst case']}); the same work as the best in "
            f"{numbers['same work as the best']}; routes taken: {', '.join(numbers['routes taken'])}",
            markup=False,
            highlight=False,
        )
    if result.settings.get("left_out"):
        why = "by the interruption" if result.settings.get("interrupted") else "for lack of time"
        console.print(f"{result.settings['left_out']} cases were left out {why}", style="yellow")
    agreement = result.summary()["agreement"]
    if agreement is not None:
        console.print(f"tokens equal to those of each prompt alone: {agreement:.2%} at worst", highlight=False)


def _coloured(case: Case, contender: str) -> str:
    ratio = case.ratio(contender)
    mark = "=" if case.is_same_work(contender) else ""
    return f"[{'green' if ratio <= TOLERANCE else 'red'}]{mark}{ratio:.3f}[/]"
