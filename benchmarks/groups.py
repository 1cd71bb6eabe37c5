"""Groups of samples that share their prompt, against as many prompts that share nothing.

    python benchmarks/groups.py [--small] [--slots N] [--out FOLDER] [--repeats N]

64 prompts of 256 tokens with 8 samples each, at temperature 1 and 256 new tokens, on the 3B geometry in bf16; the same
with the keys of a prompt read once for several samples; with prompts of 250 tokens, whose last page is copied; and 512
prompts of 256 with one sample each. Besides, 8 prompts of 2,000 tokens with 16 samples each, their keys read for each
sample and once for several. `--small` runs a few short ones on the embedded model, on a CPU.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any, Literal

import torch
from common import build, median, milliseconds, need_gpu, prompts_of, report

from liveroll import RolloutBatch, RolloutConfig, RolloutEngine, SamplingConfig
from liveroll.tools.embedded import load_embedded


def measure(engine: RolloutEngine, prompts: list[list[int]], sampling: SamplingConfig, repeats: int) -> dict[str, Any]:
    batches: list[RolloutBatch] = []
    times = milliseconds(lambda: batches.append(engine.generate(prompts, sampling)), repeats)
    stats = batches[-1].stats
    return {
        "ms": median(times),
        "all ms": [round(time, 1) for time in times],
        "prefill tokens": stats.prefill_tokens,
        "shared tokens": stats.shared_tokens,
        "prefill forwards": stats.prefill_forwards,
        "decode steps": stats.decode_steps,
        "preemptions": stats.preemptions,
        "peak pages": stats.peak_pages,
        "new tokens": stats.new_tokens,
        "cascade steps": stats.cascade_steps,
        "captures in the last call": stats.captures,
        "eager because": stats.eager_reason,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a few short prompts on the embedded model")
    parser.add_argument("--slots", type=int, default=None, help="rows that decode side by side; all of them by default")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.small:
        torch.set_num_threads(1)  # a model this small only loses to more threads
        model, _ = load_embedded()
        count, samples, width, new = 8, 4, 32, 16
    else:
        need_gpu(parser)
        model = build("3B", torch.bfloat16, "cuda")
        count, samples, width, new = 64, 8, 256, 256
    slots = arguments.slots or count * samples

    def prompts(rows: int, length: int) -> list[list[int]]:
        if not arguments.small:
            return prompts_of([length] * rows, model.config.vocab_size)
        generator = random.Random(1)
        return [[generator.randrange(4, model.config.vocab_size) for _ in range(length)] for _ in range(rows)]

    def sampled(
        rows: int, length: int, n: int, cascade: bool | Literal["auto"] = False, slots: int = slots
    ) -> dict[str, Any]:
        sampling = SamplingConfig(n=n, temperature=1.0, top_k=0, seed=1, max_new_tokens=new, stop_token_ids=())
        config = RolloutConfig(max_slots=slots, max_length=length + new, cascade=cascade)
        with RolloutEngine(model, config=config) as engine:
            return measure(engine, prompts(rows, length), sampling, arguments.repeats)

    result: dict[str, Any] = {
        "prompts": count,
        "samples": samples,
        "prompt length": width,
        "new tokens a row": new,
        "slots": slots,
        "shared": sampled(count, width, samples),
        "shared, last page in part": sampled(count, width - 6, samples),
        "nothing shared": sampled(count * samples, width, 1),
    }
    if not arguments.small:
        result["shared, read once"] = sampled(count, width, samples, cascade=True)
        result["8 prompts of 2,000 with 16 samples"] = sampled(8, 2000, 16, slots=128)
        result["8 prompts of 2,000 with 16 samples, read once"] = sampled(8, 2000, 16, cascade=True, slots=128)
    result["nothing shared / shared"] = round(result["nothing shared"]["ms"] / result["shared"]["ms"], 3)
    report("groups-small" if arguments.small else "groups", result, arguments.out)


if __name__ == "__main__":
    main()
