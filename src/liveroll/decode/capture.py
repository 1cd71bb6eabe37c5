"""Steps that are recorded once and run again: CUDA graphs on a GPU, the step itself anywhere else."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

Step = Callable[[], None]


class CapturedStep(Protocol):
    """A recorded step."""

    def replay(self) -> None:
        """Run it again over the values that its tensors have now."""
        ...


class CaptureBackend(Protocol):
    """Records steps. A step reads and writes static tensors only and is harmless to run beforehand."""

    def capture(self, step: Step) -> CapturedStep:
        """Record a step."""
        ...

    def bytes(self) -> int:
        """Bytes that recorded steps hold for their intermediate results."""
        ...


class _RecordedStep:
    def __init__(self, step: Step) -> None:
        self.replay = step


class RecordedSteps:
    """Records nothing but the step, and runs it: the same lifecycle where there are no device graphs."""

    def capture(self, step: Step) -> CapturedStep:
        """Run the step once, as every backend does before it records, and keep it."""
        step()
        return _RecordedStep(step)

    def bytes(self) -> int:
        """None are held."""
        return 0


class CudaGraphs:
    """Records CUDA graphs that share one memory pool.

    Args:
        device: the GPU.
    """

    # The first run loads kernels and picks algorithms; the second runs as every later one will.
    _WARM_UPS = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, step: Step) -> CapturedStep:
        """Warm up and record on a side stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(self._WARM_UPS):
                step()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with (
            _no_garbage_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            step()
        return graph

    def bytes(self) -> int:
        """Bytes of the segments of the shared pool."""
        segments = torch.cuda.memory_snapshot(self._pool)
        return sum(int(segment["total_size"]) for segment in segments)


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
