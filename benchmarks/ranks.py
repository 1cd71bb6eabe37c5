"""Rollouts of one model on several ranks, held to one GPU's: tensor-parallel, data-parallel, and fully sharded.

    python benchmarks/ranks.py [--cpu N] [--rounds 6] [--model tiny|3B|8B|32B] [--parts tp dp fsdp ...] [--out FOLDER]
    torchrun --nproc-per-node N benchmarks/ranks.py [...]

By itself it starts one process for each GPU that it finds, or N that talk through gloo with `--cpu`. Each part is a
group of processes of its own with a limit of time, so that one that fails or hangs takes no other with it; under
torchrun the parts share their processes, and the first that hangs is the last.

`tiny` rounds are rollouts with an optimizer step between them, in fp32 and bf16. Their fp32 tokens must be those of one
rank without sharding, which rank 0 computes beforehand. `tp` and, by DeepSpeed's AutoTP, `autotp` also move a parameter
on the last rank; that and `zero3` are there where DeepSpeed is. Every part leaves its process group after `shutdown()`.
Larger models only time 32 prompts of 16 tokens, and one of 512 beside 31 of 16, with 128 new tokens each, in bf16,
against the memory floor of a rank. `tail` times long-tail answers shared out by the queue and by a static split, and
how long ranks waited for each other.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from common import GEOMETRIES, median, report
from rank_parts import DIVIDED, PARTS, run_part
from torch import distributed as dist
from torch import multiprocessing


def join(rank: int, ranks: int, local: int, address: str, cpu: bool, seconds: float) -> str:
    """Enter the group of all ranks; the device of this one."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(ranks))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    device = "cpu" if cpu else f"cuda:{local}"
    if not cpu:
        torch.cuda.set_device(local)
    dist.init_process_group(
        "gloo" if cpu else "nccl",
        init_method=address,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=seconds),
        device_id=None if cpu else torch.device(device),
    )
    return device


def one_rank(rank: int, ranks: int, port: int, part: str, arguments: argparse.Namespace, results: Any) -> None:
    """A process of a part: report what it saw, then that it left the group."""
    try:
        device = join(rank, ranks, rank, f"tcp://127.0.0.1:{port}", arguments.cpu > 0, arguments.limit)
        results.put((rank, run_part(part, arguments.model, arguments.rounds, device)))
        dist.destroy_process_group()
        results.put((rank, "left"))
    except BaseException:
        results.put((rank, {"failure": traceback.format_exc()}))
        raise


def start_part(part: str, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a part in processes of its own, which are stopped at its limit of time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=one_rank, args=(rank, ranks, port, part, arguments, results), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    seen: dict[int, Any] = {}
    left: list[int] = []
    started = time.monotonic()
    while len(left) < ranks and not any("failure" in value for value in seen.values()):
        try:
            rank, value = results.get(timeout=max(0.1, arguments.limit - (time.monotonic() - started)))
        except Exception:
            break
        if value == "left":
            left.append(rank)
        else:
            seen[rank] = value
    for process in processes:
        process.join(5 if len(left) == ranks else 0)
        process.kill()
        process.join()
    return judge(
        part, [seen.get(rank, {"failure": "no report in time"}) for rank in range(ranks)], sorted(left), started
    )


def judge(part: str, seen: list[dict[str, Any]], left: list[int], started: float) -> dict[str, Any]:
    """The part's result, and what is wrong with it."""
    wrong = [f"rank {rank}: {value['failure']}" for rank, value in enumerate(seen) if "failure" in value]
    if len(left) < len(seen):
        wrong.append(f"of {len(seen)} ranks only {left} left the process group after shutdown()")
    for rank, value in enumerate(seen):
        for dtype, rounds in value.items():
            if dtype != "failure" and rounds.get("steps that changed tokens") == 0:
                wrong.append(f"rank {rank}, {dtype}: no optimizer step changed a token")
            if dtype == "fp32" and "same tokens" in rounds and min(rounds["same tokens"]) < 1:
                wrong.append(f"rank {rank}: fp32 tokens differ: {rounds['same tokens']}")
            if isinstance(rounds, dict) and isinstance(rounds["captures"], list):
                once, counts = rounds["captures"][0], rounds["captures"]
                if part in ("dp", *DIVIDED) and (counts != [once] * len(counts) or not once):
                    wrong.append(f"rank {rank}, {dtype}: captures {counts}")
                if part in DIVIDED and rounds["captures after a move on the last rank"] != 2 * once:
                    wrong.append(f"rank {rank}, {dtype}: a move on the last rank was not captured again")
                if rounds["bytes after shutdown"]:
                    wrong.append(f"rank {rank}, {dtype}: {rounds['bytes after shutdown']} bytes after shutdown()")
    return {"seconds": round(time.monotonic() - started, 1), "wrong": wrong, "ranks": seen}


def under_torchrun(arguments: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """All parts in the processes that torchrun started; results on rank 0 only."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = join(rank, ranks, int(os.environ["LOCAL_RANK"]), "env://", arguments.cpu > 0, arguments.limit)
    parts = {}
    for part in arguments.parts:
        started = time.monotonic()
        try:
            own = run_part(part, arguments.model, arguments.rounds, device)
        except Exception:
            own = {"failure": traceback.format_exc()}
        seen: list[Any] = [None] * ranks
        dist.all_gather_object(seen, own)
        parts[part] = judge(part, seen, list(range(ranks)), started)
    dist.destroy_process_group()
    return ranks, parts if rank == 0 else {}


def show(parts: dict[str, Any]) -> None:
    print(f"{'part':12} {'dtype':5} {'same tokens':>12} {'captures':>16} {'ms, first and median':>22}  wrong")
    for part, result in parts.items():
        first = result["ranks"][0]
        for dtype, rounds in first.items():
            if dtype == "failure":
                continue
            if "same tokens" in rounds:
                least = min(min(rank[dtype]["same tokens"]) for rank in result["ranks"] if dtype in rank)
                times = f"{rounds['ms'][0]:.0f} {median(rounds['ms'][1:] or rounds['ms']):.1f}"
                print(f"{part:12} {dtype:5} {least:12.4f} {rounds['captures']!s:>16} {times:>22}")
            else:
                for case, found in rounds.items():
                    if isinstance(found, dict):
                        rest = {name: value for name, value in found.items() if name not in ("ms", "all ms")}
                        print(f"{part:12} {dtype:5} {case:>29} {found['ms']:>22.1f}  {rest}")
        for line in result["wrong"]:
            print(f"{part:12} WRONG {line}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", type=int, default=0, help="processes on the CPU instead of one for each GPU")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--model", default="tiny", choices=["tiny", *GEOMETRIES])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--limit", type=float, default=120, help="seconds that a part may take")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        ranks, parts = under_torchrun(arguments)
    else:
        ranks = arguments.cpu or torch.cuda.device_count()
        if not ranks:
            parser.error("there is no GPU; give --cpu N")
        parts = {part: start_part(part, ranks, arguments) for part in arguments.parts}
    if not parts:
        return 0
    show(parts)
    name = "-".join(
        ["ranks", *(["cpu"] if arguments.cpu else []), *([arguments.model] if arguments.model != "tiny" else [])]
    )
    report(name, {"ranks": ranks, "rounds": arguments.rounds, "model": arguments.model, "parts": parts}, arguments.out)
    return int(any(result["wrong"] for result in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
