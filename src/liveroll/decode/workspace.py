"""The memory that cuBLAS works in where steps are captured, whose addresses captured products keep."""

from __future__ import annotations

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

    def hold(self) -> None:
        """Have torch take the memory for the calling thread from the pool, if it holds none."""
        with torch.cuda.use_mem_pool(self._pool, self._device), torch.cuda.stream(self._stream):
            # A product with a bias is cuBLASLt's, which may have memory of its own beside that of cuBLAS.
            torch.addmm(self._square[0], self._square, self._square)
