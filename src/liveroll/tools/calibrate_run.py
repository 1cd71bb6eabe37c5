"""`liveroll calibrate`: measuring a model's costs into a file, resumable after any interruption."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from liveroll.config import RolloutConfig
from liveroll.config_checks import check_whole
from liveroll.errors import ConfigError
from liveroll.planning.costs_file import write_costs
from liveroll.planning.fit import COEFFICIENTS, Measurement, errors_of
from liveroll.tools.checkpoint import load_checkpoint
from liveroll.tools.grid import Cell, WorkloadRange, plan_grid
from liveroll.tools.journal import Fingerprint, Journal, find_resumption, meta_path
from liveroll.tools.outputs import check_output, writing

if TYPE_CHECKING:
    from liveroll.tools.calibrate import Calibration
    from liveroll.tools.measure import Sample


# Each is listed before the first call, so that an interrupted run finds its place again.
_MOST_REPEATS = 1000


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """What `liveroll calibrate` was asked to do.

    Args:
        model: a checkpoint folder, the id of a model on the Hub, or `tiny`.
        out: the file to write.
        min_length: tokens of the shortest prompt.
        max_length: tokens of the longest prompt; None for 512, or what the model allows.
        max_batch: prompts that run side by side, at most.
        repeats: how often each is timed, at most; up to 1000.
        capture: whether decode steps are captured.
        compile: whether they are compiled.
        fuse: whether projections of one input are one product in them; moves the weights side by side.
        dtype: `auto` (as stored), `float32`, `bfloat16` or `float16`.
        device: `auto` (a GPU if there is one) or a torch device such as `cuda:1`.
        overwrite: forget what an interrupted run measured.

    Raises:
        ConfigError: a number is not positive or too large, or the range is empty.
    """

    model: str
    out: Path
    min_length: int = 16
    max_length: int | None = None
    max_batch: int = 32
    repeats: int = 5
    capture: bool | Literal["auto"] = "auto"
    compile: bool = False
    fuse: bool = False
    dtype: str = "auto"
    device: str = "auto"
    overwrite: bool = False

    def __post_init__(self) -> None:
        check_whole(self, "repeats", low=1, high=_MOST_REPEATS)
        self.range_within(self.max_length or max(self.min_length, 1))

    def range_within(self, longest: int) -> WorkloadRange:
        """The calls that the costs are to hold for, the longest prompt of so many tokens where none is given."""
        length = longest if self.max_length is None else self.max_length
        return WorkloadRange(min_length=self.min_length, max_length=length, max_batch=self.max_batch)


def journal_path(out: Path) -> Path:
    """Name the file beside `out` that keeps samples until the costs are written."""
    return out.with_name(out.name + ".samples.jsonl")


def run_calibrate(options: CalibrateOptions, console: Console) -> Calibration:
    """Measure a model's costs and write them.

    Each sample is kept as soon as it is taken, so that after an interruption the same call goes on from there.

    Args:
        options: what to do.
        console: where the progress bar is shown.

    Raises:
        ConfigError: the file cannot be written to, the model cannot be loaded, the range is more than it or the
            memory holds, or the samples kept are of something else.
        LiverollError: as `calibrate` raises.
    """
    check_output(options.out)
    config = RolloutConfig(capture=options.capture, compile=options.compile, fuse=options.fuse)

    from liveroll.model.identity import describe_origin
    from liveroll.tools.calibrate import calibrate, check_range, longest_prompt
    from liveroll.tools.measure import sample_id

    model = load_checkpoint(options.model, options.dtype, options.device).model
    work = options.range_within(longest_prompt(model, config))
    check_range(work, model, config)
    cells = plan_grid(work, config.prefill_max_tokens)
    fingerprint: Fingerprint = {
        "measured": asdict(describe_origin(model, config, ranks=1)),
        "range": asdict(work),
        "repeats": options.repeats,
    }
    places = [(repeat, cell) for repeat in range(options.repeats) for cell in cells]
    ids: dict[int, str | int] = {index: sample_id(cell, repeat) for index, (repeat, cell) in enumerate(places)}
    indexes = {name: index for index, name in ids.items()}
    path = journal_path(options.out)
    resumption = find_resumption(path, fingerprint, ids, overwrite=options.overwrite)
    known = _read_samples(path, resumption.keep, places)
    with Journal(path, fingerprint, resumption) as journal, _Bar(console, len(places), len(known)) as bar:

        def keep(sample: Sample) -> None:
            times = {"wall_ms": sample.wall_ms, "prefill_ms": sample.prefill_ms, "decode_ms": sample.decode_ms}
            journal.write({"index": indexes[sample.id], "id": sample.id, **times})
            bar.advance(sample.cell)

        try:
            calibration = calibrate(model, work, config, repeats=options.repeats, known=known, keep=keep)
            with writing(options.out):
                write_costs(options.out, calibration.file)
        except BaseException:
            if not path.stat().st_size:
                _forget(path)
            raise
        _forget(path)
    return calibration


def show_calibration(calibration: Calibration, console: Console) -> None:
    """Print what was measured, how far off the estimates are, and the coefficients."""
    errors = errors_of(calibration.points, calibration.costs, calibration.geometry)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "route"):
        table.add_column(name, no_wrap=True)
    for name in ("rows", "width", "measured ms", "estimated ms", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for point, error in sorted(zip(calibration.points, errors, strict=True), key=lambda pair: _order(pair[0])):
        kind = "decode step" if point.kind == "decode" else point.kind
        estimated = point.ms * (1 + error)
        numbers = (str(point.rows), str(point.width), f"{point.ms:.3f}", f"{estimated:.3f}", f"{error:+.1%}")
        table.add_row(kind, "padded" if point.route == "equal_width" else point.route, *numbers)
    console.print(table)
    coefficients = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name in COEFFICIENTS:
        coefficients.add_row(name, f"{getattr(calibration.costs, name):.6g}")
    console.print(coefficients)
    mean = sum(map(abs, errors)) / len(errors)
    worst = max(map(abs, errors))
    console.print(
        f"{len(errors)} points from {calibration.calls} calls in {calibration.seconds:.1f} s, of which "
        f"{calibration.setup_seconds:.1f} s went into first calls, captures and waiting; estimates are off by "
        f"{mean:.1%} on average, {worst:.1%} at worst",
        highlight=False,
    )


def _forget(journal: Path) -> None:
    journal.unlink()
    meta_path(journal).unlink()


def _order(point: Measurement) -> tuple[str, str, int, int]:
    return (point.kind, point.route, point.width, point.rows)


def _read_samples(path: Path, keep: int, places: list[tuple[int, Cell]]) -> dict[str, Sample]:
    """Samples in the whole rows of a journal, by their ids."""
    from liveroll.tools.measure import Sample

    known: dict[str, Sample] = {}
    if keep:
        for number, line in enumerate(path.read_bytes()[:keep].splitlines(), start=1):
            row: dict[str, Any] = json.loads(line)
            times: list[Any] = [row.get(name) for name in ("wall_ms", "prefill_ms", "decode_ms")]
            if not all(isinstance(ms, int | float) and 0 <= ms < math.inf for ms in times):
                raise ConfigError(f"line {number} of {path} holds no times; give --overwrite to measure again")
            repeat, cell = places[row["index"]]
            sample = Sample(cell, repeat, *times)
            known[sample.id] = sample
    return known


class _Bar:
    """A progress bar of calls timed, with the one timed last."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._progress = Progress(
            TextColumn("calibrating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[cell]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._total = total
        self._task = self._progress.add_task("", total=total, completed=done, cell="")

    def advance(self, cell: Cell) -> None:
        self._progress.update(self._task, advance=1, cell=cell.name)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:  # calls whose times agree were not repeated
            self._progress.update(self._task, completed=self._total)
        self._progress.stop()
