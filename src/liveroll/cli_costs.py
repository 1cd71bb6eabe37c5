"""The commands that measure what routes cost and hold the choice between them to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

_MODEL = typer.Option(help="Checkpoint folder, id of a model on the Hub, or tiny, the one that ships with liveroll.")
_DTYPE = typer.Option(help="auto, float32, bfloat16 or float16.")
_DEVICE = typer.Option(help="auto, or a torch device such as cuda:1.")
_CAPTURE = typer.Option("--capture/--no-capture", help="Whether decode steps are captured; where they can be.")
_COMPILE = typer.Option("--compile/--no-compile", help="Whether they go through torch.compile.")
_FUSE = typer.Option("--fuse/--no-fuse", help="Whether projections of one input are one product in them.")


def calibrate(
    model: Annotated[str, _MODEL],
    out: Annotated[Path, typer.Option(help="File to write the costs to.")],
    min_length: Annotated[int, typer.Option(help="Tokens of the shortest prompt.")] = 16,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of the longest; 512, or what the model allows.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Prompts that run side by side, at most.")] = 32,
    repeats: Annotated[int, typer.Option(help="How often each call is timed, at most.")] = 5,
    capture: Annotated[bool | None, _CAPTURE] = None,
    compile_steps: Annotated[bool, _COMPILE] = False,
    fuse: Annotated[bool, _FUSE] = False,
    dtype: Annotated[str, _DTYPE] = "auto",
    device: Annotated[str, _DEVICE] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Forget what an interrupted run measured.")] = False,
) -> None:
    """Measure what prefills and decode steps of a model cost here. Interrupted, the same command goes on."""
    from liveroll.tools.calibrate_run import CalibrateOptions, run_calibrate, show_calibration

    options = CalibrateOptions(
        model=model,
        out=out,
        min_length=min_length,
        max_length=max_length,
        max_batch=max_batch,
        repeats=repeats,
        capture="auto" if capture is None else capture,
        compile=compile_steps,
        fuse=fuse,
        dtype=dtype,
        device=device,
        overwrite=overwrite,
    )
    progress = Console(stderr=True)
    try:
        calibration = run_calibrate(options, progress)
    except KeyboardInterrupt:
        progress.print("interrupted; the same command, without --overwrite, goes on from here")
        raise typer.Exit(130) from None
    show_calibration(calibration, Console())
    typer.echo(f"written to {out}")


def sweep(
    model: Annotated[str, _MODEL],
    costs: Annotated[Path, typer.Option(help="File of costs, as calibrate writes it.")],
    out: Annotated[Path, typer.Option(help="File to write what was found to.")],
    workloads: Annotated[str, typer.Option(help="seed, or a file of JSON lines with name and lengths.")] = "seed",
    new_tokens: Annotated[str, typer.Option(help="Tokens to generate, such as 2,16,128.")] = "2,16",
    repeats: Annotated[int, typer.Option(help="How often each route is timed, at most.")] = 5,
    seconds: Annotated[int | None, typer.Option(help="What all of it may take; small budgets come first.")] = None,
    slots: Annotated[int | None, typer.Option(help="Rows side by side; as the largest workload needs.")] = None,
    check: Annotated[int | None, typer.Option(help="Prompts of each workload to check; 0 for none, else all.")] = None,
    check_tokens: Annotated[int | None, typer.Option(help="First tokens of each to check; else all.")] = None,
    capture: Annotated[bool | None, _CAPTURE] = None,
    compile_steps: Annotated[bool, _COMPILE] = False,
    fuse: Annotated[bool, _FUSE] = False,
    dtype: Annotated[str, _DTYPE] = "auto",
    device: Annotated[str, _DEVICE] = "auto",
) -> None:
    """Compare every route and auto on workloads, and check their tokens."""
    from liveroll.tools.sweep_run import SweepOptions, run_sweep
    from liveroll.tools.sweep_table import show_sweep

    options = SweepOptions(
        model=model,
        costs=costs,
        workloads=workloads,
        new_tokens=new_tokens,
        out=out,
        repeats=repeats,
        seconds=seconds,
        slots=slots,
        check=check,
        check_tokens=check_tokens,
        capture="auto" if capture is None else capture,
        compile=compile_steps,
        fuse=fuse,
        dtype=dtype,
        device=device,
    )
    progress = Console(stderr=True)
    try:
        result = run_sweep(options, progress)
    except KeyboardInterrupt:
        progress.print("interrupted; nothing was written")
        raise typer.Exit(130) from None
    show_sweep(result, Console(width=max(Console().width, 160)))
    typer.echo(f"written to {out}")
    if result.settings["interrupted"]:
        raise typer.Exit(130)
    if result.origin["dtype"] == "float32" and not result.agrees:
        progress.print("tokens differ from those of each prompt alone", style="bold red")
        raise typer.Exit(1)


def report(
    found: Annotated[Path, typer.Argument(help="File that sweep wrote.", metavar="SWEEP")],
    out: Annotated[Path, typer.Option(help="Page to write; its charts go beside it.")] = Path("report.html"),
) -> None:
    """Show a sweep as one HTML page and as charts."""
    from liveroll.tools.outputs import check_output
    from liveroll.tools.sweep_file import read_sweep
    from liveroll.tools.sweep_report import write_report

    check_output(out, found)
    for path in write_report(read_sweep(found), out):
        typer.echo(str(path))
