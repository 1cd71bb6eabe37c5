"""What routes cost, measured and fitted, and how near `auto` comes to the best of them.

    python benchmarks/routes.py [--out FOLDER] [--model 3B|8B|tiny] [--eager|--captured] [--compile] [--fuse]
                                [--new-tokens 2,16,128] [--repeats N] [--workloads FILE]

Calibrates on uniform calls, then runs the six built-in workloads by every route and by `auto`, interleaved. Writes the
costs, the sweep, which `liveroll report` shows, and a summary.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from common import RESULTS, build, report
from rich.console import Console

from liveroll import RolloutConfig
from liveroll.planning.costs_file import write_costs
from liveroll.planning.fit import errors_of
from liveroll.tools.calibrate import calibrate
from liveroll.tools.calibrate_run import show_calibration
from liveroll.tools.embedded import load_embedded
from liveroll.tools.grid import WorkloadRange
from liveroll.tools.sweep_result import write_sweep
from liveroll.tools.sweep_run import SweepOptions, show_sweep, sweep_model
from liveroll.tools.workloads import read_workloads

RANGE = WorkloadRange(min_length=16, max_length=512, max_batch=32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--model", default="3B", choices=["3B", "8B", "tiny"])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--captured", dest="capture", action="store_true", default=True)
    mode.add_argument("--eager", dest="capture", action="store_false")
    parser.add_argument("--compile", action="store_true", help="decode steps through torch.compile")
    parser.add_argument("--fuse", action="store_true", help="projections of one input as one product in them")
    parser.add_argument("--new-tokens", default="2,16,128")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", default="seed")
    parser.add_argument("--check", type=int, default=2, help="prompts of each workload whose tokens are checked")
    parser.add_argument("--check-tokens", type=int, default=16, help="first tokens of each that are checked")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if arguments.model == "tiny":
        torch.set_num_threads(1)  # a model this small only loses to more threads
        model = load_embedded()[0]
    else:
        model = build(arguments.model, torch.bfloat16, "cuda")

    name = f"routes-{arguments.model}-{'captured' if arguments.capture else 'eager'}"
    name += ("-compiled" if arguments.compile else "") + ("-fused" if arguments.fuse else "")
    arguments.out.mkdir(parents=True, exist_ok=True)
    costs_path, sweep_path = arguments.out / f"{name}-costs.json", arguments.out / f"{name}-sweep.json"
    console = Console(width=170)
    config = RolloutConfig(capture=arguments.capture, compile=arguments.compile, fuse=arguments.fuse)
    calibration = calibrate(model, RANGE, config)
    show_calibration(calibration, console)
    write_costs(costs_path, calibration.file)

    began = time.perf_counter()
    options = SweepOptions(
        model=arguments.model,
        costs=costs_path,
        workloads=arguments.workloads,
        new_tokens=arguments.new_tokens,
        out=sweep_path,
        repeats=arguments.repeats,
        check=arguments.check,
        check_tokens=arguments.check_tokens,
        capture=arguments.capture,
        compile=arguments.compile,
        fuse=arguments.fuse,
    )
    found = sweep_model(model, read_workloads(arguments.workloads), calibration.file, options, Console(stderr=True))
    write_sweep(sweep_path, found)
    show_sweep(found, console)
    errors = [abs(error) for error in errors_of(calibration.points, calibration.costs, calibration.geometry)]
    report(
        name,
        {
            "calibration s": round(calibration.seconds, 1),
            "sweep s": round(time.perf_counter() - began, 1),
            "mean error of the fit": round(sum(errors) / len(errors), 4),
            "worst error of the fit": round(max(errors), 4),
            "new tokens": list(options.budgets),
            "repeats": arguments.repeats,
            **found.summary(),
            "ms": {
                f"{case.workload} / {case.new_tokens}": {
                    **{contender: round(result.median_ms, 1) for contender, result in case.results.items()},
                    "auto / best": round(case.ratio(), 3),
                }
                for case in found.cases
            },
        },
        arguments.out,
    )


if __name__ == "__main__":
    main()
