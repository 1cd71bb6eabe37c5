"""The captured decode step over training rounds: captures, tokens, set-up time and memory.

    python benchmarks/lifecycle.py [--out FOLDER]

Six rounds of rollout then AdamW step on the 3B geometry, in bf16 and in fp32, prompt widths alternating.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import torch
from common import build, median, milliseconds, need_gpu, prompts_of, report

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig

ROWS, NEW = 32, 128
GREEDY = SamplingConfig(max_new_tokens=NEW, temperature=0, repetition_penalty=1.0)
GIB = 2**30


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    model.train()
    logits = model(input_ids=ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def tokens_of(batch: Any) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in batch.completions]


def agreement(left: list[tuple[int, ...]], right: list[tuple[int, ...]]) -> dict[str, float]:
    equal = sum(a == b for a, b in zip(left, right, strict=True))
    same = sum(x == y for a, b in zip(left, right, strict=True) for x, y in zip(a, b, strict=True))
    return {"rows": equal / len(left), "tokens": round(same / sum(map(len, left)), 4)}


def rounds(dtype: torch.dtype) -> dict[str, Any]:
    model = build("3B", dtype, "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if dtype == torch.float32 else 1e-4)
    vocab = model.config.vocab_size
    engine = RolloutEngine(model, config=RolloutConfig(max_slots=ROWS, max_length=1024, kv_fraction=0.3))
    before: list[tuple[int, ...]] | None = None
    rows = []
    for index in range(6):
        width = (16, 64)[index % 2]
        prompts = prompts_of([width] * ROWS, vocab, seed=1)
        probe = prompts_of([16] * 4, vocab, seed=9)
        started = time.perf_counter()
        batch = engine.generate(prompts, GREEDY)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        probed = tokens_of(engine.generate(probe, SamplingConfig(max_new_tokens=32, temperature=0)))
        eager = RolloutEngine(
            model, config=RolloutConfig(max_slots=ROWS, max_length=1024, kv_fraction=0.3, capture=False)
        )
        held = agreement(tokens_of(batch), tokens_of(eager.generate(prompts, GREEDY)))
        eager.shutdown()
        rows.append(
            {
                "width": width,
                "ms": round(seconds * 1e3, 1),
                "captures": engine.captures,
                "equal to eager": held,
                "changed since the last round": before is not None and probed != before,
                "loss": round(train_step(model, optimizer, batch.input_ids[:8]), 4),
            }
        )
        before = probed
    result = {"rounds": rows, "captures": engine.captures, "reasons": engine.recapture_reasons}
    engine.shutdown()
    return result


def speed_and_memory() -> dict[str, Any]:
    model = build("3B", torch.bfloat16, "cuda")
    vocab = model.config.vocab_size
    engine = RolloutEngine(model, config=RolloutConfig(max_slots=ROWS))
    prompts = prompts_of([16] * ROWS, vocab)
    started = time.perf_counter()
    engine.generate(prompts, GREEDY)
    first = time.perf_counter() - started
    times = milliseconds(lambda: engine.generate(prompts, GREEDY))
    engine.generate(prompts, GREEDY)

    one = SamplingConfig(max_new_tokens=1, temperature=0)
    two = SamplingConfig(max_new_tokens=2, temperature=0)
    # What the device is busy with by its own clock, and what is left of the call: nothing is waited for in between.
    watched = RolloutEngine(model, config=RolloutConfig(max_slots=ROWS, profile=True))
    watched.generate(prompts, two)
    profiles = [profile for _ in range(11) if (profile := watched.generate(prompts, one).stats.profile)][2:]
    watched.shutdown()
    spent = [profile.prefill_device_ms or 0.0 for profile in profiles]
    parts = {
        name: median([getattr(profile, f"{name}_ms") for profile in profiles])
        for name in ("intake", "planning", "scheduling", "cache", "capture", "prefill", "postprocessing")
    }
    outside = [profile.wall_ms - prefill for profile, prefill in zip(profiles, spent, strict=True)]
    both = median(milliseconds(lambda: engine.generate(prompts, two), repeats=9, warm_ups=2))
    step = (median(times) - both) / (NEW - 2)

    began = time.perf_counter()
    engine.generate(prompts[:8], two)
    torch.cuda.synchronize()
    capture = time.perf_counter() - began
    memory = engine.memory()

    slept: dict[str, Any] = {}
    free = torch.cuda.mem_get_info()[0]
    kept = engine.sleep()
    slept["gave back"] = torch.cuda.mem_get_info()[0] - free
    slept["kv bytes"] = memory.kv
    slept["captures kept"] = kept
    captures = engine.captures
    torch.cuda.synchronize()
    began = time.perf_counter()
    engine.wake()
    torch.cuda.synchronize()
    slept["wake ms"] = round((time.perf_counter() - began) * 1e3, 2)
    expected = tokens_of(engine.generate(prompts, GREEDY))
    slept["new captures"] = engine.captures - captures
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    engine.shutdown()
    gc.collect()
    torch.cuda.empty_cache()
    freed = torch.cuda.mem_get_info()[0] - free
    again = tokens_of(engine.generate(prompts, GREEDY))

    # A shape change: the old state goes before its replacement comes.
    torch.cuda.empty_cache()
    held = torch.cuda.mem_get_info()[0]
    engine.generate(prompts_of([2000] * 2, vocab), two)
    torch.cuda.synchronize()
    engine.shutdown()
    return {
        "32x16/128 ms": [round(t, 1) for t in times],
        "median ms": median(times),
        "first call s": round(first, 2),
        "step ms": round(step, 3),
        "outside prefill and replay ms": median(outside),
        "prefill ms": median(spent),
        "host ms of a call of one token": parts,
        "capture of one rung s": round(capture, 2),
        "memory": {"kv": memory.kv, "graphs": memory.graphs, "static": memory.static},
        "sleep": slept,
        "shutdown freed": freed,
        "same tokens after wake and shutdown": expected == again,
        "free before shape change": held,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--part", choices=["speed", "bfloat16", "float32"], help="one part alone")
    arguments = parser.parse_args()
    need_gpu(parser)
    torch.backends.cuda.matmul.allow_tf32 = False
    parts = [arguments.part] if arguments.part else ["speed", "bfloat16", "float32"]
    result: dict[str, Any] = {}
    for part in parts:
        gc.collect()
        torch.cuda.empty_cache()
        result[part] = speed_and_memory() if part == "speed" else rounds(getattr(torch, part))
    report("lifecycle" + (f"-{arguments.part}" if arguments.part else ""), result, arguments.out)


if __name__ == "__main__":
    main()
