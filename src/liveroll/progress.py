"""A progress bar of finished completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from liveroll.scheduling.request import Request


@contextmanager
def completion_progress(total: int, shown: bool) -> Iterator[Callable[[Sequence[Request]], None]]:
    """A function to call with requests as they finish; it draws a bar if `shown`."""
    if not shown:
        yield lambda finished: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("rollout"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    tokens = 0
    with Progress(*columns) as progress:
        bar = progress.add_task("rollout", total=total, tokens=0)

        def tick(finished: Sequence[Request]) -> None:
            nonlocal tokens
            tokens += sum(request.new for request in finished)
            progress.update(bar, advance=len(finished), tokens=tokens)

        yield tick
