"""What routes cost, measured and fitted, and how near `auto` comes to the best of them.

    python benchmarks/routes.py [--out FOLDER] [--model 3B|8B|tiny] [--modes captured,eager] [--compile] [--fuse]
                                [--new-tokens 2,16,128] [--repeats N] [--workloads FILE] [--seconds S]

For each mode: calibrates on uniform calls, then runs the six built-in workloads by every route and by `auto`, with
packed routes and without. Writes the costs, the sweep, which `liveroll report` shows, and a summary. With captured
steps of the 3B geometry on a GPU it also compares the bucketed route to figures published for such a card.

Each case is printed and kept as soon as it is done. `--seconds` bounds the sweep of a mode: cases that would exceed it
are left out, those of many new tokens first.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, build, median, milliseconds, prompts_of, report
from rich.console import Console

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig
from liveroll.planning.costs_file import write_costs
from liveroll.planning.fit import errors_of
from liveroll.tools.calibrate import calibrate
from liveroll.tools.calibrate_run import show_calibration
from liveroll.tools.embedded import load_embedded
from liveroll.tools.grid import WorkloadRange
from liveroll.tools.sweep_file import write_sweep
from liveroll.tools.sweep_result import AUTO, AUTO_PADDED, CONTENDERS, Case
from liveroll.tools.sweep_run import SweepOptions, sweep_model
from liveroll.tools.sweep_table import show_sweep
from liveroll.tools.workloads import read_workloads

RANGE = WorkloadRange(min_length=16, max_length=512, max_batch=32)
PUBLISHED = {
    "32x16 / 16": ([16] * 32, 16, 199.96),
    "1x512 + 31x16 / 16": ([512, *[16] * 31], 16, 334.98),
    "16..512 / 16": (list(range(16, 513, 16)), 16, 482.64),
    "32x16 / 128": ([16] * 32, 128, 1507.89),
    "1x512 + 31x16 / 128": ([512, *[16] * 31], 128, 2352.57),
}
"""Lengths, new tokens, and the milliseconds that a call takes elsewhere with bucketed prefill and captured decode: 3B
geometry, bfloat16, one H200."""


def compare_bucketed(model: Any, config: RolloutConfig, costs: Path) -> dict[str, Any]:
    """Calls of the bucketed route beside the published figures for them."""
    rows = {}
    settings = {"prefill_route": "bucketed", "costs": costs, "max_slots": 32, "max_length": 640}
    shared = {name: getattr(config, name) for name in ("capture", "compile", "fuse")}
    with RolloutEngine(model, config=RolloutConfig(**settings, **shared)) as engine:
        for name, (lengths, budget, published) in PUBLISHED.items():
            prompts = prompts_of(lengths, model.config.vocab_size)
            sampling = SamplingConfig(max_new_tokens=budget, temperature=0, stop_token_ids=(), logprobs=False)

            def call(prompts=prompts, sampling=sampling) -> None:
                engine.generate(prompts, sampling)

            ms = median(milliseconds(call, repeats=3))
            rows[name] = {"ms": ms, "published ms": published, "faster": ms < published}
    return rows


def print_case(case: Case) -> None:
    """A line for a case, as soon as it is done."""
    times = " ".join(f"{name.replace(' ', '_')}={case.label(name)}" for name in CONTENDERS)
    ratios = " ".join(
        f"{case.ratio(name):.3f}{' same work' if case.is_same_work(name) else ''}" for name in (AUTO, AUTO_PADDED)
    )
    print(f"{case.workload} / {case.new_tokens}: {times} | auto/best {ratios} | noise {case.noise:.1%}", flush=True)


def run_mode(model: Any, mode: str, arguments: argparse.Namespace) -> None:
    """Calibrate, sweep and report in one mode."""
    name = f"routes-{arguments.model}-{mode}"
    name += ("-compiled" if arguments.compile else "") + ("-fused" if arguments.fuse else "")
    costs_path, sweep_path = arguments.out / f"{name}-costs.json", arguments.out / f"{name}-sweep.json"
    console = Console(width=190)
    config = RolloutConfig(capture=mode == "captured", compile=arguments.compile, fuse=arguments.fuse)
    calibration = calibrate(model, RANGE, config, seconds=arguments.calibrate_seconds or None)
    show_calibration(calibration, console)
    write_costs(costs_path, calibration.file)
    bucketed = {}
    if arguments.model == "3B" and mode == "captured" and model.device.type == "cuda":
        bucketed = compare_bucketed(model, config, costs_path)
        print(bucketed, flush=True)

    began = time.perf_counter()
    options = SweepOptions(
        model=arguments.model,
        costs=costs_path,
        workloads=arguments.workloads,
        new_tokens=arguments.new_tokens,
        out=sweep_path,
        repeats=arguments.repeats,
        seconds=arguments.seconds,
        check=arguments.check,
        check_tokens=arguments.check_tokens,
        capture=config.capture,
        compile=arguments.compile,
        fuse=arguments.fuse,
    )
    found = sweep_model(
        model,
        read_workloads(arguments.workloads),
        calibration.file,
        options,
        Console(stderr=True, quiet=True),
        case_seconds=arguments.case_seconds,
        keep=print_case,
    )
    write_sweep(sweep_path, found)
    show_sweep(found, console)
    errors = [abs(error) for error in errors_of(calibration.points, calibration.costs, calibration.geometry)]
    result = {
        "calibration s": round(calibration.seconds, 1),
        "of it first calls, captures and waiting s": round(calibration.setup_seconds, 1),
        "calls timed in it": calibration.calls,
        "sweep s": round(time.perf_counter() - began, 1),
        "mean error of the fit": round(sum(errors) / len(errors), 4),
        "worst error of the fit": round(max(errors), 4),
        "settings": found.settings,
        **found.summary(),
        "ms": {
            f"{case.workload} / {case.new_tokens}": {
                **{contender: case.label(contender) for contender in case.results},
                "auto / best": round(case.ratio(), 3),
                "auto without packed / best": round(case.ratio(AUTO_PADDED), 3),
                "same work": [case.is_same_work(contender) for contender in (AUTO, AUTO_PADDED)],
                "noise": round(case.noise, 3),
            }
            for case in found.cases
        },
    }
    report(name, {**result, "bucketed": bucketed} if bucketed else result, arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--model", default="3B", choices=["3B", "8B", "tiny"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--modes", default="captured,eager", help="captured, eager, or both with a comma")
    parser.add_argument("--compile", action="store_true", help="decode steps through torch.compile")
    parser.add_argument("--fuse", action="store_true", help="projections of one input as one product in them")
    parser.add_argument("--new-tokens", default="2,16,128")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case-seconds", type=float, default=2.0, help="what repeats of one case may take")
    parser.add_argument("--seconds", type=int, default=None, help="what the sweep of one mode may take")
    parser.add_argument("--calibrate-seconds", type=float, default=12.0, help='12 is what "auto" has; 0 for no limit')
    parser.add_argument("--workloads", default="seed")
    parser.add_argument("--check", type=int, default=2, help="prompts of each workload whose tokens are checked")
    parser.add_argument("--check-tokens", type=int, default=8, help="first tokens of each that are checked")
    arguments = parser.parse_args()
    modes = arguments.modes.split(",")
    if not set(modes) <= {"captured", "eager"}:
        parser.error(f"--modes holds captured and eager, not {arguments.modes}")
    torch.backends.cuda.matmul.allow_tf32 = False
    if arguments.model == "tiny":
        torch.set_num_threads(1)  # a model this small only loses to more threads
        model = load_embedded()[0].to(arguments.device)
    else:
        model = build(arguments.model, torch.bfloat16, arguments.device)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for mode in modes:
        run_mode(model, mode, arguments)


if __name__ == "__main__":
    main()
