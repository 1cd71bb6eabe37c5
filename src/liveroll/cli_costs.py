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


def calibrate(
    model: Annotated[str, _MODEL],
    out: Annotated[Path, typer.Option(help="File to write the costs to.")],
    min_length: Annotated[int, typer.Option(help="Tokens of the shortest prompt.")] = 16,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of the longest; 512, or what the model allows.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Prompts that run side by side, at most.")] = 32,
    repeats: Annotated[int, typer.Option(help="How often each call is timed.")] = 3,
    capture: Annotated[bool | None, _CAPTURE] = None,
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
