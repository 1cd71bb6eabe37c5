"""Every benchmark and test that needs a GPU, shared out over the GPUs of the machine.

    python benchmarks/everything.py [JOB ...] [--out FOLDER] [--seconds S] [--deepspeed FOLDER] [--list]

Without names all jobs run. Tests in which nothing is timed come first, some of them together on each GPU, as they
mostly compile kernels. Then come the others, longest first, one at a time on each GPU; those that are about several
GPUs, or about what the host does, come last and alone, and have all GPUs. What a job prints is kept in FOLDER, and so
are results. `--seconds` bounds the whole: a job that would not end in time, by what is expected on an H200, is left
out. One that takes three times that is ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from common import RESULTS, report
from rich.console import Console

ROOT = Path(__file__).parents[1]
SLOWER = 3
"""Times what a job is expected to take that it is given."""
TOGETHER = 3
"""Jobs in which nothing is timed that share a GPU."""


@dataclass(frozen=True)
class Job:
    """A command of Python.

    Attributes:
        seconds: what it is expected to take on an H200, about.
        arguments: of Python, in the root of the repository.
        alone: nothing runs beside it, as it is about all GPUs together or about what the host does.
        timed: its results are times, or it looks at what memory is free: nothing else uses its GPU.
    """

    seconds: int
    arguments: tuple[str, ...]
    alone: bool = False
    timed: bool = True


def _benchmark(seconds: int, text: str, alone: bool = False) -> Job:
    return Job(seconds, tuple(f"benchmarks/{text}".split()), alone)


def _tests(seconds: int, *paths: str, workers: int = 1, alone: bool = False, timed: bool = False) -> Job:
    """Tests, where `workers` processes share the GPU: most of their time goes into compiling kernels."""
    shared = ("-p", "no:benchmark", "-n", str(workers)) if workers > 1 else ()
    return Job(
        seconds, ("-m", "pytest", "-q", "--thorough", *shared, *(f"tests/{path}" for path in paths)), alone, timed
    )


JOBS = {
    "lifecycle-speed": _benchmark(30, "lifecycle.py --part speed", alone=True),
    "lifecycle-bfloat16": _benchmark(45, "lifecycle.py --part bfloat16"),
    "lifecycle-float32": _benchmark(60, "lifecycle.py --part float32"),
    "sampling": _benchmark(20, "sampling.py --step-ms 2.58"),
    "decode": _benchmark(330, "decode.py --cases A,B,C,D,E"),
    "decode-F": _benchmark(400, "decode.py --cases F --name decode-F --repeats 3"),
    "decode-G": _benchmark(400, "decode.py --cases G --name decode-G --repeats 3"),
    "decode-8B": _benchmark(100, "decode.py --model 8B --cases A,B --contenders fused --repeats 5"),
    "decode-32B": _benchmark(150, "decode.py --model 32B --cases A,B --contenders fused --repeats 3"),
    "decode-MoE": _benchmark(240, "decode.py --model MoE --cases A,B --contenders captured --repeats 3"),
    "decode-long": _benchmark(120, "decode.py --cases long,longer --contenders fused --name decode-long --repeats 3"),
    "decode-8B-long": _benchmark(
        120, "decode.py --model 8B --cases long --contenders fused --name decode-8B-long --repeats 3"
    ),
    "decode-curve": _benchmark(300, "decode.py --cases A --contenders fused --name decode-curve --curve --repeats 1"),
    "prefill": _benchmark(300, "prefill.py --fuse --compile"),
    "routes-captured": _benchmark(120, "routes.py --model 3B --modes captured --seconds 130"),
    "routes-eager": _benchmark(
        400,
        "routes.py --model 3B --modes eager --calibrate-seconds 0 --repeats 7 --case-seconds 5 --seconds 320",
        alone=True,
    ),
    "host": _benchmark(10, "host.py", alone=True),
    "routes-tiny": _benchmark(50, "routes.py --model tiny --modes captured --seconds 60", alone=True),
    "attention": _benchmark(40, "attention.py"),
    "groups": _benchmark(200, "groups.py"),
    "parity": _benchmark(240, "parity.py"),
    "tests-kernels": _tests(75, "kernels", workers=8),
    "tests-lifecycle": _tests(105, "gpu/test_lifecycle.py", "gpu/test_gpu_workspace.py", timed=True),
    "tests-parity": _tests(85, "gpu/test_parity.py", workers=6),
    "tests-sampling": _tests(40, "gpu/test_gpu_sampling.py", "gpu/test_gpu_groups.py", workers=6),
    "tests-compile": _tests(55, "gpu/test_gpu_compile.py", "gpu/test_gpu_prefill.py", workers=6),
    "tests-costs": _tests(
        35, "gpu/test_gpu_costs.py", "gpu/test_gpu_planning.py", "gpu/test_gpu_profile.py", "gpu/test_gpu_experts.py"
    ),
    "tests-trainers": _tests(25, "gpu/test_gpu_trainers.py", timed=True),
    "tests-ranks": _tests(65, "gpu/test_gpu_ranks.py", "gpu/test_gpu_devices.py", alone=True),
    "ranks": _benchmark(200, "ranks.py --rounds 6 --limit 75", alone=True),
    "ranks-8B": _benchmark(45, "ranks.py --model 8B --parts tp", alone=True),
    "ranks-32B": _benchmark(55, "ranks.py --model 32B --parts tp", alone=True),
}


class Runner:
    """Runs jobs and keeps what became of each.

    Args:
        out: the folder for results and what jobs print.
        deepspeed: the folder of DeepSpeed's Python files, or None.
        seconds: what all jobs together may take.
    """

    def __init__(self, out: Path, deepspeed: Path | None, seconds: float) -> None:
        self._out, self._deepspeed = out, deepspeed
        self._ends = time.monotonic() + seconds
        self._console = Console(width=150)
        self.done: dict[str, dict[str, Any]] = {}

    def run(self, names: list[str], gpus: list[str]) -> None:
        """Run jobs, each on one of `gpus`, which are values of CUDA_VISIBLE_DEVICES; one at a time for each entry."""
        free: SimpleQueue[str] = SimpleQueue()
        for gpu in gpus:
            free.put(gpu)

        def work(name: str) -> None:
            gpu = free.get()
            try:
                self._run_one(name, gpu)
            finally:
                free.put(gpu)

        with ThreadPoolExecutor(len(gpus)) as pool:
            list(pool.map(work, sorted(names, key=lambda name: -JOBS[name].seconds)))

    def _run_one(self, name: str, gpu: str) -> None:
        left = self._ends - time.monotonic()
        if left < JOBS[name].seconds:
            self.done[name] = {"status": "left out"}
        else:
            began = time.monotonic()
            status = self._start(name, gpu, left)
            self.done[name] = {"status": status, "seconds": round(time.monotonic() - began, 1)}
        self._console.print(f"{name:<20} {self.done[name]}", highlight=False)

    def _start(self, name: str, gpu: str, left: float) -> str:
        job = JOBS[name]
        source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "PYTHONPATH": source}
        with (self._out / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                self._command(job), cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                status = process.wait(min(left, SLOWER * job.seconds))
            except subprocess.TimeoutExpired:
                return "took too long"
            finally:
                # A benchmark of ranks has processes of its own.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return "passed" if status == 0 else f"failed ({status})"

    def _command(self, job: Job) -> list[str]:
        script = job.arguments[0]
        out = ["--out", str(self._out)] if script.endswith(".py") else []
        peers = ["--deepspeed", str(self._deepspeed)] if self._deepspeed and script.endswith("decode.py") else []
        return [sys.executable, *job.arguments, *out, *peers]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="one of those that --list shows")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="what all jobs together may take")
    parser.add_argument("--deepspeed", type=Path, default=None, help="folder of DeepSpeed's Python files")
    parser.add_argument("--list", action="store_true", help="show the jobs and run none")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.jobs if name not in JOBS]:
        parser.error(f"there are no such jobs: {', '.join(unknown)}; --list shows those there are")
    names = arguments.jobs or list(JOBS)
    if arguments.list:
        for name in names:
            print(f"{name:<20} {JOBS[name].seconds:>4} s  {' '.join(JOBS[name].arguments)}")
        return 0
    gpus = [str(index) for index in range(torch.cuda.device_count())]
    if not gpus:
        parser.error("there is no GPU")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    runner = Runner(out, arguments.deepspeed and arguments.deepspeed.resolve(), arguments.seconds)
    runner.run([name for name in names if not (JOBS[name].timed or JOBS[name].alone)], gpus * TOGETHER)
    runner.run([name for name in names if JOBS[name].timed and not JOBS[name].alone], gpus)
    runner.run([name for name in names if JOBS[name].alone], [",".join(gpus)])
    report("everything", {"gpus": len(gpus), "jobs": runner.done}, out)
    return int(any(done["status"].startswith(("failed", "took")) for done in runner.done.values()))


if __name__ == "__main__":
    sys.exit(main())
