"""Continuous batching against `model.generate` over padded batches, on the embedded model.

    python benchmarks/throughput.py [--out FOLDER] [--repeats N]

64 prompts of mixed length whose answers have a long tail (8 to 128 tokens, lognormal), on 16 slots; `model.generate`
takes them in padded batches of 16 and runs each to its longest answer. Tokens that were asked for count.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from common import median, milliseconds, report

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig
from liveroll.tools.embedded import load_embedded

PROMPTS, SLOTS = 64, 16
SHORTEST, LONGEST = 8, 128


def workload(vocab_size: int, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    generator = random.Random(seed)
    prompts = [[generator.randrange(4, vocab_size) for _ in range(generator.randrange(4, 25))] for _ in range(PROMPTS)]
    budgets = [min(LONGEST, max(SHORTEST, int(generator.lognormvariate(3.2, 0.9)))) for _ in range(PROMPTS)]
    return prompts, budgets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a model this small only loses to more threads
    model, _ = load_embedded()
    prompts, budgets = workload(model.config.vocab_size)
    engine = RolloutEngine(model, config=RolloutConfig(max_slots=SLOTS))
    sampling = [
        SamplingConfig(max_new_tokens=budget, temperature=1.0, top_k=0, seed=1, stop_token_ids=()) for budget in budgets
    ]

    def padded_batches() -> None:
        for start in range(0, PROMPTS, SLOTS):
            chunk = prompts[start : start + SLOTS]
            width = max(map(len, chunk))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in chunk])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in chunk])
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(budgets[start : start + SLOTS]),
                do_sample=True,
                top_k=0,
                eos_token_id=None,
            )

    ours, theirs = [], []
    for index in range(arguments.repeats + 1):
        pair = (
            milliseconds(lambda: engine.generate(prompts, sampling), repeats=1, warm_ups=0)[0],
            milliseconds(padded_batches, repeats=1, warm_ups=0)[0],
        )
        if index:
            ours.append(pair[0])
            theirs.append(pair[1])
    stats = engine.generate(prompts, sampling).stats
    tokens = sum(budgets)
    report(
        "throughput",
        {
            "tokens": tokens,
            "engine ms": median(ours),
            "model.generate ms": median(theirs),
            "engine tokens/s": round(tokens / median(ours) * 1e3),
            "model.generate tokens/s": round(tokens / median(theirs) * 1e3),
            "ratio": round(median(theirs) / median(ours), 3),
            "ratios": [round(b / a, 3) for a, b in zip(ours, theirs, strict=True)],
            "decode steps": stats.decode_steps,
            "prefill forwards": stats.prefill_forwards,
        },
        arguments.out,
    )


if __name__ == "__main__":
    main()
