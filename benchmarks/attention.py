"""What decode attention of one layer costs, with the keys of prompts read for each sample and once for several.

    python benchmarks/attention.py [--repeats N] [--out FOLDER]

A case is prompts, samples of each, tokens of a prompt and of a response so far, over the heads of one geometry, in bf16
with pages of 16. Layers take turns over keys and values of their own, more than a GPU's cache holds, in one CUDA graph.
`floor` reads every key and value once, at the card's copy rate; `spared` are the bytes that rows need not read again,
by which the engine decides (`liveroll.planning.cascade`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import COPY_BYTES_PER_SECOND, report
from rich.console import Console
from rich.table import Table
from torch import Tensor

from liveroll.attention.fast import GpuAttention
from liveroll.attention.layout import PagedLayout, SharedPrefixes
from liveroll.decode.prefixes import PrefixTable
from liveroll.model.geometry import AttentionTraits
from liveroll.scheduling.clusters import Clusters

HEADS = {"3B": (16, 2), "8B": (32, 8), "32 of 32": (32, 32)}
CASES = [
    (64, 8, 256, 128),
    (8, 16, 2000, 128),
    (4, 8, 256, 64),
    (4, 8, 1000, 64),
    (2, 16, 4000, 128),
    (16, 16, 512, 256),
    (1, 64, 1000, 64),
    (32, 1, 16, 64),
    (64, 1, 4096, 32),
]
DIM, PAGE = 128, 16
CACHED = 256 * 2**20
"""Bytes of keys and values that layers have together, five times an H200's cache."""


def microseconds(run: Callable[[], Any], calls: int, repeats: int) -> float:
    """Of each of the calls that `run` makes, from a CUDA graph of them."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        run()
    times = []
    for _ in range(repeats):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / calls)
    return sorted(times)[len(times) // 2]


def clusters_of(prompts: int, samples: int, tokens: int, together: int) -> Clusters:
    """Clusters of rows that stand in the order of their prompts."""
    parts = [
        part
        for first in range(0, prompts * samples, samples)
        for part in np.array_split(np.arange(first, first + samples), -(-samples // together))
    ]
    members = np.full((len(parts), together), -1, np.int32)
    for cluster, part in enumerate(parts):
        members[cluster, : len(part)] = part
    return Clusters(members, np.full(len(parts), tokens, np.int32))


def tables_of(prompts: int, samples: int, shared: int, own: int) -> tuple[Tensor, int]:
    """Pages of each row, the first `shared` of which all samples of a prompt have, and how many there are."""
    rows = prompts * samples
    prefix = 1 + torch.arange(prompts * shared).view(prompts, shared).repeat_interleave(samples, 0)
    rest = 1 + prompts * shared + torch.arange(rows * own).view(rows, own)
    return torch.cat([prefix, rest], 1).int().cuda(), 1 + prompts * shared + rows * own


def measure(heads: tuple[int, int], case: tuple[int, int, int, int], repeats: int) -> dict[str, Any]:
    (query_heads, kv_heads), (prompts, samples, tokens, response) = heads, case
    rows, shared, device = prompts * samples, tokens // PAGE, torch.device("cuda")
    table, pages = tables_of(prompts, samples, shared, -(-(response + tokens % PAGE) // PAGE))
    token_bytes = 2 * kv_heads * DIM * 2
    layers = max(2, -(-CACHED // (pages * PAGE * token_bytes)))
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    query, key, value = normal(rows, query_heads, DIM), normal(rows, kv_heads, DIM), normal(rows, kv_heads, DIM)
    stored = [(normal(pages, PAGE, kv_heads, DIM), normal(pages, PAGE, kv_heads, DIM)) for _ in range(layers)]
    length = tokens + response
    lengths = torch.full((rows,), length, dtype=torch.int64, device=device)
    index = table[:, (length - 1) // PAGE].long() * PAGE + (length - 1) % PAGE
    attention = GpuAttention(device, rows * kv_heads)
    together = attention.rows_together(query_heads // kv_heads, torch.bfloat16)
    traits, longest = AttentionTraits(DIM**-0.5, None, None), table.shape[1] * PAGE

    def time(prefixes: SharedPrefixes | None) -> float:
        layout = PagedLayout(table, lengths, index, longest, prefixes)

        def run() -> None:
            for keys, values in stored:
                attention.paged(query, key, value, keys, values, layout, traits, None)

        return microseconds(run, layers, repeats)

    result = {
        "floor us": (prompts * shared * PAGE + rows * (length - shared * PAGE))
        * token_bytes
        / COPY_BYTES_PER_SECOND
        * 1e6,
        "each row us": time(None),
        "once us": None,
        "spared MiB": 0.0,
    }
    if samples > 1:
        clusters = clusters_of(prompts, samples, shared * PAGE, together)
        held = PrefixTable(rows, together, device)
        held.load(clusters, rows)
        result["once us"] = time(held.view(rows))
        result["spared MiB"] = (rows - len(clusters.tokens)) * shared * PAGE * token_bytes / 2**20
    return {name: value if value is None else round(value, 2) for name, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    shown = Table("heads", "prompts x samples", "tokens", "floor us", "each row us", "once us", "spared MiB")
    for name, heads in HEADS.items():
        for case in CASES:
            measured = measure(heads, case, arguments.repeats)
            prompts, samples, tokens, response = case
            results.append(
                {"heads": name, "prompts": prompts, "samples": samples, "tokens": [tokens, response], **measured}
            )
            shown.add_row(name, f"{prompts} x {samples}", f"{tokens} + {response}", *map(str, measured.values()))
            torch.cuda.empty_cache()
    Console(width=120).print(shown)
    report("attention", {"cases": results}, arguments.out)


if __name__ == "__main__":
    main()
