"""Processes that hold a model between them, or each a copy, and what they report."""

from __future__ import annotations

import queue
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import zoo
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.nn import functional as F

WORLD = 2
PATIENCE = 50
"""Seconds for all that a rank does, start-up included; only a hang takes them."""

# Processes begin as copies of one that has imported all of this; not where there is a GPU, which transformers looks for
# as it is imported: a copy of a process that did could not use it.
_context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
_context.set_forkserver_preload(
    ["transformers.models.llama.modeling_llama", "liveroll.engine", "torch.distributed.tensor.parallel"]
)


class _RowParallel(nn.Module):
    """Adds up the ranks' parts of a product over the intermediate numbers."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        part = F.linear(hidden, self.weight)
        dist.all_reduce(part)
        return part


def shard(model: nn.Module, rank: int) -> nn.Module:
    """Leave a rank its half of the intermediate numbers of every MLP."""
    for layer in model.model.layers:
        mlp = layer.mlp
        for name in ("gate_proj", "up_proj"):
            projection = getattr(mlp, name)
            projection.weight = nn.Parameter(projection.weight.detach().chunk(WORLD)[rank].clone())
        mlp.down_proj = _RowParallel(mlp.down_proj.weight.detach().chunk(WORLD, dim=1)[rank].clone())
    return model


def sharded(rank: int) -> nn.Module:
    """The rank's part of `zoo.build("llama")`."""
    return shard(zoo.build("llama"), rank)


class Ranks:
    """Processes of a gloo group, each of which runs `work(rank, report)`; what hangs is killed at the end."""

    def __init__(self, work: Callable[..., None], world: int = WORLD, *arguments: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._reports = [_context.Queue() for _ in range(world)]
        self._processes = [
            _context.Process(target=_run, args=(work, rank, world, port, self._reports[rank], *arguments), daemon=True)
            for rank in range(world)
        ]

    def __enter__(self) -> Ranks:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def report(self, rank: int, patience: float = PATIENCE) -> Any:
        """The next thing that a rank reports; raises TimeoutError where none comes."""
        try:
            failure, value = self._reports[rank].get(timeout=patience)
        except queue.Empty:
            raise TimeoutError(f"rank {rank} reports nothing") from None
        if failure is not None:
            raise AssertionError(f"rank {rank} failed:\n{failure}")
        return value

    def ended(self, rank: int) -> bool:
        """Whether a rank comes to its end by itself."""
        self._processes[rank].join(PATIENCE)
        return self._processes[rank].exitcode == 0


class Crew:
    """Ranks that stay, so that many checks cost one start: each task is run by all of them at the same time."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._tasks = [_context.SimpleQueue() for _ in range(world)]
        self._ranks = Ranks(_serve, world, self._tasks)

    def __enter__(self) -> Crew:
        self._ranks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._ranks.__exit__(*error)

    def run(self, task: Callable[..., Any], *arguments: Any, patience: float = PATIENCE) -> list[Any]:
        """What `task(rank, *arguments)` returns on each rank; what it raises is raised here."""
        for tasks in self._tasks:
            tasks.put((task, arguments))
        return [self._ranks.report(rank, patience) for rank in range(self._world)]


def _serve(rank: int, report: Callable[[Any], None], tasks: Any) -> None:
    while True:
        task, arguments = tasks[rank].get()
        report(task(rank, *arguments))


def _run(work: Callable[..., None], rank: int, world: int, port: int, reports: Any, *arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=2 * PATIENCE),
        )
        work(rank, lambda value: reports.put((None, value)), *arguments)
    except BaseException:
        reports.put((traceback.format_exc(), None))
        raise
