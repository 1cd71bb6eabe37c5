"""What a packed prefill takes, eager and captured, and its attention alone.

    python benchmarks/prefill.py [--geometry 3B] [--compile] [--fuse] [--out FOLDER]

Of each workload: the first token of every prompt in one call, and a call of 16 tokens, in ms of wall time. Then one
layer's attention in µs: the engine's kernel, and PyTorch's told the true longest sequence.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import GEOMETRIES, build, median, milliseconds, need_gpu, prompts_of, report

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig
from liveroll.attention.layout import PackedLayout
from liveroll.kernels.packed_attention import packed_attention
from liveroll.model.versions import varlen_attention

WORKLOADS = {
    "32x16": [16] * 32,
    "1x512+31x16": [512] + [16] * 31,
    "1x512": [512],
    "32x48": [48] * 32,
    "1x2000": [2000],
    "16x200": [200] * 16,
    "16..512": [16 * (1 + row) for row in range(32)],
}
LAUNCHES = 200


def calls(geometry: str, limit: int, settings: dict[str, Any]) -> dict[str, Any]:
    model = build(geometry, torch.bfloat16, "cuda")
    result: dict[str, Any] = {}
    for name, capture in (("eager", False), ("captured", True)):
        config = RolloutConfig(
            max_slots=32, max_length=2048, prefill_capture=capture, prefill_capture_tokens=limit, **settings
        )
        engine = RolloutEngine(model, config=config)
        for workload, lengths in WORKLOADS.items():
            prompts = prompts_of(lengths, model.config.vocab_size)
            row = result.setdefault(workload, {})
            before = engine.prefill_captures
            began = time.perf_counter()
            engine.generate(prompts, SamplingConfig(max_new_tokens=1, temperature=0))
            torch.cuda.synchronize()
            first = time.perf_counter() - began
            engine.generate(prompts, SamplingConfig(max_new_tokens=16, temperature=0))
            for new in (1, 16):
                sampling = SamplingConfig(max_new_tokens=new, temperature=0)
                row[f"{name} {new} new ms"] = median(milliseconds(partial(engine.generate, prompts, sampling)))
            if engine.prefill_captures > before:
                row["captured first call s"] = round(first, 2)
            stats = engine.generate(prompts, SamplingConfig(max_new_tokens=1, temperature=0)).stats
            row[f"{name} tokens"] = stats.prefill_tokens
            if capture and stats.prefill_eager_reason:
                row["reason"] = stats.prefill_eager_reason
        result[f"{name} memory"] = vars(engine.memory())
        engine.shutdown()
    return result


def attention(geometry: str) -> dict[str, Any]:
    shape = GEOMETRIES[geometry]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    dim = shape.get("head_dim", shape["hidden_size"] // heads)
    result = {}
    for workload, lengths in WORKLOADS.items():
        layout = PackedLayout.of(lengths, torch.device("cuda"))
        query, key, value = (
            torch.randn(sum(lengths), count, dim, device="cuda", dtype=torch.bfloat16)
            for count in (heads, kv_heads, kv_heads)
        )
        settings = {"scale": dim**-0.5, "window": None, "softcap": None, "sinks": None}
        varlen = varlen_attention(grouped=heads != kv_heads)
        longest, starts = max(lengths), layout.starts
        ours = partial(packed_attention, query, key, value, layout.column, **settings)
        bounds = (starts, starts, longest, longest)
        theirs = partial(varlen, query, key, value, *bounds, scale=dim**-0.5, window_size=(-1, 0))
        result[workload] = {"ours us": _replayed(ours), "varlen_attn us": _replayed(theirs)}
    return result


def _replayed(run: Callable[[], Any]) -> float:
    """Microseconds of a launch within a graph of many."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            run()
    return round(median(milliseconds(graph.replay)) * 1e3 / LAUNCHES, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--geometry", default="3B", choices=GEOMETRIES)
    parser.add_argument("--limit", type=int, default=2048, help="tokens up to which a prefill is captured")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--fuse", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    need_gpu(parser)
    result = {"attention": attention(arguments.geometry)}
    print(result, flush=True)
    settings = {"compile": arguments.compile, "fuse": arguments.fuse}
    result["calls"] = calls(arguments.geometry, arguments.limit, settings)
    report("prefill", {"settings": {**settings, "limit": arguments.limit}, **result}, arguments.out)


if __name__ == "__main__":
    main()
