"""The command that looks at what liveroll runs on, and at how near it is to the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

_STEPS = "Whether decode steps are so; where they can be, unless said."


def doctor(
    model: Annotated[str | None, typer.Option(help="Checkpoint folder, id of a model on the Hub, or tiny.")] = None,
    parity: Annotated[
        bool, typer.Option("--parity", help="Compare log-probabilities with those of the model's own forward.")
    ] = False,
    prompts: Annotated[Path | None, typer.Option(help="File of prompts, as generate reads it.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens of each response, at most; 64.")] = None,
    n: Annotated[int | None, typer.Option(help="Samples of each prompt; 4.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the samples; 0.")] = None,
    slots: Annotated[int, typer.Option(help="Rows that decode side by side, at most.")] = 32,
    route: Annotated[str, typer.Option(help="packed, bucketed, equal_width, per_prompt, ordinary or auto.")] = "packed",
    capture: Annotated[bool | None, typer.Option("--capture/--no-capture", help=_STEPS)] = None,
    compile_steps: Annotated[bool | None, typer.Option("--compile/--no-compile", help=_STEPS)] = None,
    fuse: Annotated[bool | None, typer.Option("--fuse/--no-fuse", help=_STEPS)] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, or a torch device such as cuda:1.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Tell what liveroll runs on, what a model allows, and with --parity how near the engine is to its trainer.

    Ends with 1 where the model cannot be rolled out, or is farther from the trainer than rounding explains.
    """
    from liveroll.tools.doctor import DoctorOptions, run_doctor
    from liveroll.tools.doctor_report import describe_diagnosis, show_diagnosis

    options = DoctorOptions(
        model=model,
        parity=parity,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        n=n,
        seed=seed,
        slots=slots,
        route=route,
        capture="auto" if capture is None else capture,
        compile="auto" if compile_steps is None else compile_steps,
        fuse="auto" if fuse is None else fuse,
        dtype=dtype,
        device=device,
    )
    diagnosis = run_doctor(options)
    if as_json:
        typer.echo(json.dumps(describe_diagnosis(diagnosis)))
    else:
        show_diagnosis(diagnosis, Console())
    if not diagnosis.healthy:
        raise typer.Exit(1)
