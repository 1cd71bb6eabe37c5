"""What decode attention of one layer costs, with the keys of prompts read for each sample and once for several.

    python benchmarks/attention.py [--repeats N] [--out FOLDER]

A case is prompts, samples of each, tokens of a prompt (of the last one, where the others have ever fewer) and of a
response so far, over the heads of one geometry, in bf16 with pages of 16. Layers take turns over keys and values of
their own, more than a GPU's cache holds, in one CUDA graph. `floor` reads every key and value once, at the card's copy
rate; `spared` are the bytes that rows need not read again, by which the engine decides (`liveroll.planning.cascade`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import COPY_BYTES_PER_SECOND, need_gpu, report
from rich.console import Console
from rich.table import Table
from torch import Tensor

from liveroll.attention.fast import GpuAttention
from liveroll.attention.layout import PagedLayout, SharedPrefixes
from liveroll.decode.prefixes import PrefixTable
from liveroll.model.geometry import AttentionTraits
from liveroll.scheduling.clusters import Clusters

HEADS = {"3B": (16, 2), "8B": (32, 8), "32 of 32": (32, 32)}

DIM, PAGE = 128, 16
CACHED = 256 * 2**20
"""Bytes of keys and values that layers have together, five times an H200's cache."""


@dataclass(frozen=True)
class Case:
    """Rows of a decode step, the samples of a prompt beside each other.

    Attributes:
        prompts: how many.
        samples: of each.
        tokens: of a prompt.
        response: tokens of each response so far.
        ragged: whether prompts grow to `tokens` evenly, from the first to the last.
    """

    prompts: int
    samples: int
    tokens: int
    response: int
    ragged: bool = False

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [self.tokens * (i + 1) // self.prompts if self.ragged else self.tokens for i in range(self.prompts)]

    def __str__(self) -> str:
        return f"{self.prompts} x {self.samples} of {'up to ' if self.ragged else ''}{self.tokens} + {self.response}"


CASES = [
    Case(64, 8, 256, 128),
    Case(8, 16, 2000, 128),
    Case(4, 8, 256, 64),
    Case(4, 8, 1000, 64),
    Case(2, 16, 4000, 128),
    Case(16, 16, 512, 256),
    Case(1, 64, 1000, 64),
    Case(32, 1, 16, 64),
    Case(32, 1, 512, 8, ragged=True),
    Case(64, 1, 4096, 32),
]


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


def clusters_of(case: Case, together: int) -> Clusters:
    """Clusters of rows that stand in the order of their prompts."""
    parts = [
        (part, tokens // PAGE * PAGE)
        for prompt, tokens in enumerate(case.lengths)
        for part in np.array_split(np.arange(case.samples) + prompt * case.samples, -(-case.samples // together))
    ]
    members = np.full((len(parts), together), -1, np.int32)
    for cluster, (part, _) in enumerate(parts):
        members[cluster, : len(part)] = part
    return Clusters(members, np.array([tokens for _, tokens in parts], np.int32))


def pages_of(case: Case) -> tuple[Tensor, int]:
    """Pages of each row, the first of which all samples of a prompt have, and how many there are."""
    rows, used = [], 1
    for tokens in case.lengths:
        shared = list(range(used, used + tokens // PAGE))
        used += len(shared)
        for _ in range(case.samples):
            own = -(-(tokens % PAGE + case.response) // PAGE)
            rows.append(shared + list(range(used, used + own)))
            used += own
    widest = max(map(len, rows))
    table = torch.tensor([row + [0] * (widest - len(row)) for row in rows], dtype=torch.int32)
    return table.cuda(), used


def measure(heads: tuple[int, int], case: Case, repeats: int) -> dict[str, Any]:
    (query_heads, kv_heads), device = heads, torch.device("cuda")
    table, pages = pages_of(case)
    rows, token_bytes = len(table), 2 * kv_heads * DIM * 2
    layers = max(2, -(-CACHED // (pages * PAGE * token_bytes)))
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)

    query, key, value = normal(rows, query_heads, DIM), normal(rows, kv_heads, DIM), normal(rows, kv_heads, DIM)
    stored = [(normal(pages, PAGE, kv_heads, DIM), normal(pages, PAGE, kv_heads, DIM)) for _ in range(layers)]
    lengths = torch.tensor([tokens + case.response for tokens in case.lengths for _ in range(case.samples)]).to(device)
    last = lengths - 1
    index = table.gather(1, last[:, None] // PAGE)[:, 0].long() * PAGE + last % PAGE
    attention = GpuAttention(device, rows * kv_heads)
    together = attention.rows_together(query_heads // kv_heads, torch.bfloat16)
    traits, longest = AttentionTraits(DIM**-0.5, None, None), table.shape[1] * PAGE

    def time(prefixes: SharedPrefixes | None) -> float:
        layout = PagedLayout(table, lengths, index, longest, prefixes)

        def run() -> None:
            for keys, values in stored:
                attention.paged(query, key, value, keys, values, layout, traits, None)

        return round(microseconds(run, layers, repeats), 2)

    clusters = clusters_of(case, together)
    shared = sum(tokens // PAGE * PAGE for tokens in case.lengths)
    read = (int(lengths.sum()) - (case.samples - 1) * shared) * token_bytes
    spared = (case.samples * shared - int(clusters.tokens.sum())) * token_bytes
    once = None
    if spared:
        held = PrefixTable(rows, together, device)
        held.load(clusters, rows)
        once = time(held.view(rows))
    return {
        "floor us": round(read / COPY_BYTES_PER_SECOND * 1e6, 2),
        "each row us": time(None),
        "once us": once,
        "spared MiB": round(spared / 2**20, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    need_gpu(parser)
    results: list[dict[str, Any]] = []
    shown = Table("heads", "prompts x samples of tokens", "floor us", "each row us", "once us", "spared MiB")
    for name, heads in HEADS.items():
        for case in CASES:
            measured = measure(heads, case, arguments.repeats)
            results.append({"heads": name, "case": str(case), **measured})
            shown.add_row(name, str(case), *map(str, measured.values()))
            print(f"{name}: {case}: {measured}", flush=True)
            torch.cuda.empty_cache()
    Console(width=120).print(shown)
    report("attention", {"cases": results}, arguments.out)


if __name__ == "__main__":
    main()
