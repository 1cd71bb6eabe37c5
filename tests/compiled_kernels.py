"""Compiles the kernels for a GPU where there is none, and prints what each needs of a multiprocessor.

    python tests/compiled_kernels.py

A line for each kernel: its name and its bytes of shared memory. They are launched as the library
launches them, with Triton's driver replaced by one that says which GPU it is and launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sampled_rows import admitted, request_with
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from liveroll.attention.layout import SharedPrefixes
from liveroll.decode.sampler import Variant
from liveroll.kernels.few_rows import gated_product, normed_product
from liveroll.kernels.kv_write import write_kv
from liveroll.kernels.locate import locate
from liveroll.kernels.move import move
from liveroll.kernels.packed_attention import packed_attention
from liveroll.kernels.page_copy import copy_pages
from liveroll.kernels.paged_attention import paged_attention
from liveroll.kernels.prefix_attention import attend_prefixes, rows_together
from liveroll.kernels.sample import sample_fused
from liveroll.scheduling.details import NOTHING, Wanted

VOCAB, SIZE = 151936, 151665
HALF, FULL = torch.bfloat16, torch.float32


class Hopper:
    """What Triton asks of a driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Ada(Hopper):
    """A GPU of less memory, and of other matrix units."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 89, 32)

    def get_current_device(self) -> int:
        return 1


def compile_only(kernel: JITFunction, grid: Any) -> Callable[..., None]:
    def launch(*arguments: Any, **settings: Any) -> None:
        if "DEVICE" in settings:
            settings["DEVICE"] = True
        if "EARLY" in settings:
            settings["EARLY"] = driver.active.get_current_target().arch >= 90
        compiled = kernel.warmup(*arguments, grid=grid, **settings)
        print(kernel.fn.__name__, compiled.metadata.shared)

    return launch


def compile_attention(dtype: torch.dtype, dim: int, rows: int, **traits: Any) -> None:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    heads, kv_heads, numbers = 8, 2, torch.ones(rows, dtype=torch.int64)
    traits = {"scale": 0.1, "window": None, "softcap": None, "sinks": None} | traits
    query, key, value = (zeros(rows, count, dim) for count in (heads, kv_heads, kv_heads))
    keys, values = zeros(9, 16, kv_heads, dim), zeros(9, 16, kv_heads, dim)
    table, arrived = torch.zeros(rows, 256, dtype=torch.int32), torch.zeros(rows * kv_heads, dtype=torch.int32)
    # Keys for a few splits: what merges them is repeated for each, and takes no memory.
    paged_attention(query, key, value, keys, values, table, numbers, numbers, arrived, longest=1024, **traits)
    packed_attention(query, key, value, numbers, **traits)
    members = torch.zeros(rows // 2, rows_together(heads // kv_heads, dtype), dtype=torch.int32)
    prefixes = SharedPrefixes(members[0, :1], members, members[:, 0], table[:, 0])
    alike = {"scale": 0.1, "softcap": traits["softcap"]}
    prefix = attend_prefixes(query, keys, values, table, prefixes, longest=1024, **alike)
    lasting = (table, numbers, numbers, arrived)
    sinks = traits["sinks"]
    paged_attention(
        query, key, value, keys, values, *lasting, longest=1024, window=None, sinks=sinks, prefix=prefix, **alike
    )


def compile_all() -> None:
    compile_attention(HALF, 128, 8)
    compile_attention(HALF, 256, 8, window=100, softcap=30.0, sinks=torch.zeros(8, dtype=HALF))
    compile_attention(FULL, 256, 8)
    for rows in (64, 65):
        x, residual = torch.zeros(rows, 2048, dtype=HALF), torch.zeros(rows, 1024, dtype=HALF)
        gated_product(x, torch.zeros(2048, 2048, dtype=HALF))
        normed_product(x, torch.zeros(1024, 2048, dtype=HALF), residual, residual[0], 1e-6)

    state, slots = admitted([request_with(), request_with(top_p=0.9)], VOCAB, SIZE)
    for variant, wanted in ((Variant.PLAIN, NOTHING), (Variant.FULL, Wanted(raw=True, top=8, kept=64))):
        sample_fused(torch.zeros(2, VOCAB, dtype=HALF), state, slots, variant, wanted)
    move(state.numbers, state.stops, slots, slots, torch.zeros(2), state.history)
    locate(state.numbers, state.block_table, slots, 16)

    pages = torch.zeros(3, 16, 2, 80, dtype=HALF)
    write_kv(pages[0, :2], pages[0, :2], pages, pages, slots)
    copy_pages(pages.view(-1).view(torch.int64), slots, slots, 1280, slots, slots)


if __name__ == "__main__":
    driver.set_active(Hopper())
    JITFunction.__getitem__ = compile_only
    compile_all()
    # An H200 gives wide heads more than others have.
    driver.set_active(Ada())
    compile_attention(HALF, 512, 8)
