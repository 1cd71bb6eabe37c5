"""How long ranks wait for one another, with a static split and with the shared queue: a simulation up to 4,096 ranks.

The queue's own code (`scheduling.shares.deal`) deals the rows; ranks are simulated from one end of a row to the next,
by the scheduler's rule for refills. A decode step takes what was measured for the 3B geometry on an H200, by rows.
Lengths are lognormal; parts of the spread are common to the samples of a prompt and, in the second of two cases, to the
prompts of a rank. A rank takes a chunk from a store that serves one rank after the other. Prints and keeps one JSON,
and draws a chart in docs/.

    python benchmarks/queue_simulation.py            # some minutes on one core
    python benchmarks/queue_simulation.py --small    # up to 64 ranks
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from common import RESULTS, report
from simulated_ranks import Job, draw, floor, simulate, static
from torch import distributed as dist

from liveroll.scheduling.admission import refill_of
from liveroll.scheduling.shares import deal

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CHART = Path(__file__).parents[1] / "docs" / "ranks.png"
ROWS_OF_32_MS = 3.3
"""A decode step of 32 rows of the 3B geometry, captured, on an H200."""
RANK_SPREAD = 0.4
"""Between ranks, where each has a task of its own."""


def step_line() -> tuple[float, float]:
    """Milliseconds of a decode step: fixed, and for each row, through measurements of 32 and of 512 rows."""
    measured = json.loads((RESULTS / "groups.json").read_text())
    rows, steps = measured["slots"], measured["shared"]["decode steps"]
    most = measured["shared"]["ms"] / (steps + 1)
    each = (most - ROWS_OF_32_MS) / (rows - 32)
    return ROWS_OF_32_MS - 32 * each, each


def compare(job: Job, seeds: int, line: tuple[float, float]) -> dict[str, Any]:
    """Both policies on the same rows, over some draws of them."""
    runs: dict[str, list[dict[str, Any]]] = {"static": [], "queue": []}
    floors = []
    for seed in range(seeds):
        rows = draw(job, seed)
        floors.append(floor(job, rows, line))
        runs["static"].append(simulate(job, static(rows, job.ranks), line))
        shared = deal(rows, job.ranks, job.slots, refill_of(job.slots))  # type: ignore[arg-type]
        runs["queue"].append(simulate(job, shared, line))
    result: dict[str, Any] = {
        "ranks": job.ranks,
        "rows a slot": job.prompts * job.samples / job.slots,
        "floor ms": round(float(np.mean(floors)), 1),
    }
    for policy, results in runs.items():
        result[policy] = {
            "ms": round(float(np.mean([run["ms"] for run in results])), 1),
            "idle": round(float(np.mean([run["idle"] for run in results])), 4),
            "idle of each draw": [run["idle"] for run in results],
            "chunks taken": round(float(np.mean([run["chunks taken"] for run in results])), 1),
        }
    result["static / queue"] = round(result["static"]["ms"] / result["queue"]["ms"], 3)
    return result


def store_round_trip(times: int = 2000) -> float:
    """Milliseconds of one take from a store on this machine."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    client.add("numbers", 1)
    started = time.perf_counter()
    for _ in range(times):
        client.add("numbers", 1)
    return round((time.perf_counter() - started) / times * 1e3, 4)


def draw_chart(by_ranks: dict[str, Any], by_work: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    for axis, cases, key, label in (
        (axes[0], by_ranks, "ranks", "ranks (4 rows for each slot)"),
        (axes[1], by_work, "rows a slot", "rows for each slot (64 ranks)"),
    ):
        for (case, results), style in zip(cases.items(), ("-", "--"), strict=True):
            for policy, color in (("static", "tab:orange"), ("queue", "tab:blue")):
                places = [result[key] for result in results]
                idle = [100 * result[policy]["idle"] for result in results]
                low = [100 * min(result[policy]["idle of each draw"]) for result in results]
                high = [100 * max(result[policy]["idle of each draw"]) for result in results]
                axis.plot(places, idle, style, marker="o", color=color, label=f"{policy}, {case}")
                axis.fill_between(places, low, high, color=color, alpha=0.15)
        axis.set_xscale("log", base=2)
        axis.set_xticks(places, [f"{place:g}" for place in places])
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time spent waiting for the last rank, %")
    axes[0].set_ylim(bottom=0)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="up to 64 ranks, and nothing is drawn")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    job, line = Job(), step_line()
    sizes = [8, 64] if arguments.small else [8, 32, 128, 512, 2048, 4096]
    by_ranks: dict[str, list[dict[str, Any]]] = {}
    by_work: dict[str, list[dict[str, Any]]] = {}
    for case, spread in (("ranks alike", 0.0), ("a task for each rank", RANK_SPREAD)):
        of_case = replace(job, rank_spread=spread)
        by_ranks[case] = []
        for ranks in sizes:
            seeds = arguments.seeds if ranks < 1024 else 2
            by_ranks[case].append(compare(replace(of_case, ranks=ranks), seeds, line))
            print(case, json.dumps(by_ranks[case][-1]), flush=True)
        by_work[case] = [
            compare(replace(of_case, prompts=prompts), arguments.seeds, line) for prompts in (4, 8, 16, 32, 64)
        ]
    latencies = {
        f"{latency:g} ms": compare(replace(job, queue_ms=latency), arguments.seeds, line)["queue"]["ms"]
        for latency in (0.1, 1.0, 10.0, 100.0)
    }
    result = {
        "job": asdict(job),
        "step ms": {"fixed": round(line[0], 4), "a row": round(line[1], 5)},
        "store round trip here, ms": store_round_trip(),
        "by ranks": by_ranks,
        "by rows a slot, 64 ranks": by_work,
        "ms with the queue by its latency, 64 ranks alike": latencies,
    }
    if arguments.small:
        print(json.dumps(result))
        return
    draw_chart(by_ranks, by_work, CHART)
    report("queue-simulation", result)


if __name__ == "__main__":
    main()
