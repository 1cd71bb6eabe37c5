"""Steps that are recorded once and run again: CUDA graphs on a GPU, the step itself anywhere else."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Protocol

import torch

from liveroll.decode.workspace import Workspace
from liveroll.model.versions import end_capture

Step = Callable[[], None]

# Engines in several threads capture one after the other, since they do it on one stream.
_capturing = Lock()


class CapturedStep(Protocol):
    """A recorded step."""

    def replay(self) -> None:
        """Run it again over the values that its tensors have now."""
        ...


class CaptureBackend(Protocol):
    """Records steps. A step reads and writes static tensors only and is harmless to run beforehand."""

    def warm_up(self, step: Step) -> None:
        """Run a step, as must be done before it is recorded."""
        ...

    def record(self, step: Step) -> CapturedStep:
        """Record a step. What it does on the device is not done meanwhile."""
        ...

    def bytes(self) -> int:
        """Bytes that recorded steps hold for their intermediate results."""
        ...


class _RecordedStep:
    def __init__(self, step: Step) -> None:
        self.replay = step


class RecordedSteps:
    """Records nothing but the step, and runs it: the same lifecycle where there are no device graphs."""

    def warm_up(self, step: Step) -> None:
        """Run the step once, as every backend does before it records."""
        step()

    def record(self, step: Step) -> CapturedStep:
        """Keep the step."""
        return _RecordedStep(step)

    def bytes(self) -> int:
        """None are held."""
        return 0


class CudaGraphs:
    """Records CUDA graphs that share one memory pool; a capture that breaks costs it, and the next share another.

    Args:
        device: the GPU.
    """

    # The first run loads kernels and picks algorithms; the second runs as every later one will.
    _WARM_UPS = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools = [torch.cuda.graph_pool_handle()]
        self._stream, self._workspace = _side_stream(device)
        self._flag = torch.zeros(1, device=device)

    def warm_up(self, step: Step) -> None:
        """Run the step on a side stream."""
        with _capturing:
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            try:
                self._workspace.hold()
                with torch.cuda.stream(self._stream):
                    for _ in range(self._WARM_UPS):
                        step()
            finally:
                # A step that fails half-way has begun on the device, over tensors that what comes next uses too.
                current.wait_stream(self._stream)

    def record(self, step: Step) -> CapturedStep:
        """Record the step on the side stream."""
        with _capturing:
            # Another graph or thread may have let it go since the step was warmed up.
            self._workspace.hold()
            try:
                return self._record(step)
            except Exception:
                self._recover()
                raise

    def bytes(self) -> int:
        """Bytes of the segments of the pools."""
        return sum(int(segment["total_size"]) for pool in self._pools for segment in torch.cuda.memory_snapshot(pool))

    def _record(self, step: Step) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with (
            _no_garbage_collection(),
            # A capture that breaks leaves its stream the current one.
            torch.cuda.stream(self._stream),
            torch.cuda.graph(graph, pool=self._pools[-1], stream=self._stream, capture_error_mode="thread_local"),
        ):
            step()
        return graph

    def _recover(self) -> None:
        """Undo what a broken capture leaves: its pool takes no other, and the random generator waits for its end."""
        end_capture(self._device, self._pools[-1])
        self._pools.append(torch.cuda.graph_pool_handle())
        self._record(self._do_little)

    def _do_little(self) -> None:
        self._flag.zero_()


@cache
def _side_stream(device: torch.device) -> tuple[torch.cuda.Stream, Workspace]:
    """The stream of all captures, since cuBLAS takes 32 MiB for each one that it is used on, and these 32 MiB."""
    stream = torch.cuda.Stream(device)
    return stream, Workspace(device, stream)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Inside, nothing is collected: what frees device memory must not do so while a stream is captured."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def choose_capture(device: torch.device) -> CaptureBackend:
    """The backend for a device."""
    return CudaGraphs(device) if device.type == "cuda" else RecordedSteps()
