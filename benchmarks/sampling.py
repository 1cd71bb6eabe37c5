"""What sampling costs in a decode step: its kernels alone, replayed from a CUDA graph.

    python benchmarks/sampling.py [--out FOLDER] [--step-ms MS]

Logits are bf16 over 151936 tokens, of two shapes: `flat`, as of a model with random weights, where top-p keeps most
tokens, and `peaked`, as of a trained one, where it keeps few. `sort` is the bound found by sorting in torch. Shares are
of a decode step of `--step-ms`; the default is a step of a 3B model at 32 short rows on an H200.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import need_gpu, report

from liveroll.decode.sampler import Variant
from liveroll.decode.state import Column, RowState, Setting
from liveroll.decode.truncation import find_bounds, keeps
from liveroll.kernels.draw import Source, draw
from liveroll.kernels.sample import sample_fused
from liveroll.kernels.scores import score
from liveroll.kernels.truncate import find_bounds as find_bounds_fused
from liveroll.scheduling.details import NOTHING, Wanted
from liveroll.scheduling.request import Request
from liveroll.types import ResolvedSampling

VOCAB = 151936
ROWS = (32, 256)
PLAIN = ResolvedSampling(
    max_new_tokens=999,
    min_new_tokens=0,
    n=1,
    do_sample=True,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    stop_token_ids=(),
    stop=(),
    seed=None,
    logprobs=True,
    pad_token_id=0,
)
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2}
BIASES = {
    "logit_bias": tuple((token, 1.0) for token in range(0, 300, 10)),
    "forbidden_tokens": tuple(range(5, 300, 10)),
}
FILTERS = {"top_k": 50, "top_p": 0.9, "min_p": 0.02}
SETTINGS: dict[str, tuple[dict[str, Any], Wanted]] = {
    "greedy": ({"do_sample": False}, NOTHING),
    "temperature": ({"temperature": 0.8}, NOTHING),
    "temperature, raw logprobs": ({"temperature": 0.8}, Wanted(raw=True)),
    "temperature, top 8 logprobs": ({"temperature": 0.8}, Wanted(top=8)),
    "top-k 50": ({"top_k": 50}, NOTHING),
    "top-p 0.9": ({"top_p": 0.9}, NOTHING),
    "min-p 0.05": ({"min_p": 0.05}, NOTHING),
    "penalties": (PENALTIES, NOTHING),
    "all filters, penalties and biases": ({**FILTERS, **PENALTIES, **BIASES}, NOTHING),
    "top-k 50, kept ids": ({"top_k": 50}, Wanted(kept=64)),
}
CALLS, REPLAYS = 10, 10


def logits_of(shape: str, rows: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(rows)
    noise = torch.randn(rows, VOCAB, device="cuda", generator=generator)
    if shape == "flat":
        return noise.bfloat16()
    rank = torch.stack([torch.randperm(VOCAB, device="cuda", generator=generator) for _ in range(rows)])
    return (18 - 1.6 * (rank + 1.0).log() + 0.3 * noise).bfloat16()


def rows_of(rows: int, setting: dict[str, Any]) -> tuple[RowState, torch.Tensor]:
    """Rows of one setting in the middle of their responses."""
    widths = {"table_width": 1, "stop_width": 8, "adjusted_width": 64}
    state = RowState(rows, **widths, vocab_size=VOCAB, device=torch.device("cuda"))
    state.keep_histories()
    tokens, sampling = np.random.default_rng(0).integers(0, VOCAB, (rows, 512)), replace(PLAIN, **setting)
    requests = [
        Request(
            row=row,
            prompt_index=row,
            sample_index=0,
            group=row,
            prompt=own[:256],
            padding_ids=(),
            sampling=sampling,
            stream=(row, 1),
            tokens=own[256:],
            slot=row,
        )
        for row, own in enumerate(tokens)
    ]
    return state, state.admit(requests)


def microseconds(run: Callable[[], Any]) -> float:
    """Time of one run of many in a graph; the first runs compile."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return round(start.elapsed_time(end) * 1e3 / (CALLS * REPLAYS), 1)


def parts(logits: torch.Tensor, setting: dict[str, Any]) -> dict[str, Any]:
    """Times of the kernels of one setting, one group after the other."""
    state, slots = rows_of(len(logits), setting)
    scores = score(logits, state, slots)
    source = Source(scores.values, state.sampled_size, find_bounds_fused(scores, state, slots))

    def prepared_and_bounded() -> None:
        find_bounds_fused(score(logits, state, slots), state, slots)

    first = microseconds(lambda: score(logits, state, slots))
    return {
        "scores": first,
        "bounds": round(microseconds(prepared_and_bounded) - first, 1),
        "draw": microseconds(lambda: draw(logits, source, state, slots, None)),
        "kernels": kernels(prepared_and_bounded),
    }


def kernels(run: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each kernel of one run, by its name."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPLAYS):
            run()
        torch.cuda.synchronize()
    return {event.key: round(event.device_time_total / REPLAYS, 1) for event in profile.key_averages()}


def limits_of(state: RowState, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
    numbers, settings = state.numbers[slots], state.settings[slots]
    return numbers[:, Column.TOP_K], settings[:, Setting.TAIL], settings[:, Setting.LEAST]


def sorted_and_checked(logits: torch.Tensor, setting: dict[str, Any]) -> dict[str, Any]:
    """How long sorting takes for the same bound, how many tokens are kept, and whether both keep the same."""
    state, slots = rows_of(len(logits), setting)
    limits, scores = limits_of(state, slots), score(logits, state, slots)
    kept = keeps(scores.values, *find_bounds(scores.values, *limits))
    same = keeps(scores.values, *find_bounds_fused(scores, state, slots)).equal(kept)
    sorting = microseconds(lambda: find_bounds(scores.values, *limits))
    return {"sort": sorting, "tokens kept": round(kept.sum(1).float().mean().item(), 1), "same": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--step-ms", type=float, default=2.99)
    arguments = parser.parse_args()
    need_gpu(parser)
    times: dict[str, dict[str, float]] = {}
    checks: dict[str, dict[str, Any]] = {}
    for rows in ROWS:
        for shape in ("flat", "peaked"):
            logits, place = logits_of(shape, rows), f"{rows} rows, {shape}"
            times[place] = {}
            for name, (setting, wanted) in SETTINGS.items():
                state, slots = rows_of(rows, setting)
                variant = Variant.of([replace(PLAIN, **setting)])
                times[place][name] = microseconds(
                    lambda state=state, slots=slots, variant=variant, wanted=wanted, logits=logits: sample_fused(
                        logits, state, slots, variant, wanted
                    )
                )
                print(f"{place}: {name}: {times[place][name]} µs", flush=True)
            for name in ("top-k 50", "top-p 0.9"):
                setting = SETTINGS[name][0]
                checks[f"{place}: {name}"] = parts(logits, setting) | (
                    sorted_and_checked(logits, setting) if rows == ROWS[0] else {}
                )
    step = arguments.step_ms * 1e3
    share = {
        shape: {name: round(100 * time / step, 2) for name, time in times[f"{ROWS[0]} rows, {shape}"].items()}
        for shape in ("flat", "peaked")
    }
    result = {"microseconds": times, "percent of a step": share, "step ms": arguments.step_ms, "parts": checks}
    report("sampling", {"vocabulary": VOCAB, **result}, arguments.out)


if __name__ == "__main__":
    main()
