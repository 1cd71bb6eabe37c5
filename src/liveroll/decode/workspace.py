"""The memory that cuBLAS works in where steps are captured, whose addresses captured products keep."""

from __future__ import annotations

import ctypes

import torch


class Workspace:
    """What cuBLAS works in on one stream, in a pool that is kept: nothing else is ever put where it was.

    torch takes this memory with the first product that a thread runs on a stream. It lets it go with any graph captured
    there (`CUDAGraph.reset` of torch 2.13), and that of every stream when it captures what was compiled with
    `mode="reduce-overhead"`. Products captured before go on writing there.

    Args:
        device: the GPU.
        stream: on which steps are captured.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._stream = stream
        self._square = torch.zeros(16, 16, device=device)
        with torch.cuda.device(device):
            self._pool = torch.cuda.MemPool()
        # It outlives the interpreter: where a capture broke or a kernel failed before, its end would abort the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pool))

    def hold(self) -> None:
        """Have torch take the memory for the calling thread from the pool, if it holds none."""
        try:
            self._multiply()
        except torch.OutOfMemoryError:
            # For a pool torch gives back none of the memory that it caches.
            torch.cuda.empty_cache()
            self._multiply()

    def _multiply(self) -> None:
        with torch.cuda.use_mem_pool(self._pool, self._device), torch.cuda.stream(self._stream):
            # The product with a bias is cuBLASLt's, which may have memory of its own; the one without is cuBLAS's.
            torch.addmm(self._square[0], self._square, self._square @ self._square)
