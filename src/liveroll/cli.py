"""The command line. What needs torch is imported inside the commands, so that `liveroll --help` is quick."""

from __future__ import annotations

import json
import platform
import traceback
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from liveroll.cli_costs import calibrate, report, sweep
from liveroll.cli_doctor import doctor
from liveroll.errors import LiverollError
from liveroll.sampling_config import SamplingConfig


class _Commands(TyperGroup):
    """Commands whose errors, where liveroll raised them on purpose, are a message and not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LiverollError as error:
            if ctx.params["debug"]:
                traceback.print_exc()
            _stderr().print(f"error: {error}", style="bold red", markup=False, highlight=False)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Commands,
    help="The Hugging Face model you are training, as a fast rollout engine, in place.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _all_commands(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for what it writes.")] = Path("out/demo"),
    rounds: Annotated[int, typer.Option(min=1, help="Training rounds.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same run.")] = 0,
) -> None:
    """Train the model that ships with liveroll to do sums, generating its own data as it learns."""
    from liveroll.tools.demo import run_demo

    run_demo(out, rounds, seed)


@app.command()
def generate(
    model: Annotated[str, typer.Option(help="Checkpoint folder, id of a model on the Hub, or tiny.")],
    prompts: Annotated[Path, typer.Option(help="File of JSON lines, each with prompt, messages or prompt_ids.")],
    out: Annotated[Path, typer.Option(help="File to write one JSON line a prompt to, and to go on with.")],
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens to generate, at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this mass.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = None,
    n: Annotated[int, typer.Option(help="Samples of each prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Line i, counted from 0, has the seed SEED + i.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends a response; repeatable.")] = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Write each token's log-probability.")] = False,
    slots: Annotated[int, typer.Option(help="Rows that decode side by side, at most.")] = 32,
    route: Annotated[str, typer.Option(help="packed, bucketed, equal_width, per_prompt, ordinary or auto.")] = "packed",
    costs: Annotated[Path | None, typer.Option(help="File of measured costs that auto and bucketed go by.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, or a torch device such as cuda:1.")] = "auto",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Pass over bad lines.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start the output file again.")] = False,
) -> None:
    """Generate for every line of a file. Interrupted, the same command goes on where it stopped.

    A sampling option that is not given has the value that the model's own generation configuration gives it.
    """
    from liveroll.tools.generate import GenerateOptions, run_generate

    sampling = SamplingConfig(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        n=n,
        seed=seed,
        stop=tuple(stop or ()),
        logprobs=logprobs,
    )
    options = GenerateOptions(
        model=model,
        prompts=prompts,
        out=out,
        sampling=sampling,
        slots=slots,
        route=route,
        costs=costs,
        dtype=dtype,
        device=device,
        skip_bad=skip_bad,
        overwrite=overwrite,
    )
    console = _stderr()
    try:
        summary = run_generate(options, console)
    except KeyboardInterrupt:
        console.print("interrupted; the same command, without --overwrite, goes on from here")
        raise typer.Exit(130) from None
    console.print(f"{out}: {summary}", markup=False, highlight=False)


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="Checkpoint folder, id of a model on the Hub, or tiny.")],
    prompts: Annotated[Path | None, typer.Option(help="File of prompts, as generate reads it.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Instead: tokens of each prompt, such as 16,16,512.")] = None,
    costs: Annotated[Path | None, typer.Option(help="File of measured costs; the defaults without one.")] = None,
    max_slots: Annotated[int, typer.Option(help="Rows that decode side by side, at most.")] = 32,
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens to generate, at most.")] = None,
    n: Annotated[int, typer.Option(help="Samples of each prompt.")] = 1,
    route: Annotated[str, typer.Option(help="The configured route.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, or a torch device such as cuda:1.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Explain how a call would be routed and what each route is estimated to cost, without running it."""
    from liveroll.tools.plan import PlanOptions, describe_plan, run_plan, show_plan

    options = PlanOptions(
        model=model,
        prompts=prompts,
        lengths=lengths,
        sampling=SamplingConfig(max_new_tokens=max_new_tokens, n=n, seed=0),
        costs=costs,
        max_slots=max_slots,
        route=route,
        dtype=dtype,
        device=device,
    )
    made = run_plan(options)
    if as_json:
        typer.echo(json.dumps(describe_plan(made)))
    else:
        show_plan(made, Console())


app.command()(calibrate)
app.command()(sweep)
app.command()(report)
app.command()(doctor)


@app.command()
def version() -> None:
    """Print the versions of liveroll and of what it runs on."""
    for package in ("liveroll", "torch", "transformers"):
        typer.echo(f"{package} {version_of(package)}")
    typer.echo(f"python {platform.python_version()}")


def main() -> None:
    """Run the command line."""
    app(prog_name="liveroll")


def _stderr() -> Console:
    # Without soft_wrap rich would break long messages at the width of a terminal that is not there.
    return Console(stderr=True, soft_wrap=True)
