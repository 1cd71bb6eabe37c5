"""How many greedy responses equal `model.generate`'s, by architecture and route, in fp32 on a GPU or CPU.

    python benchmarks/parity.py [--out FOLDER]

Tiny random models of many architectures; five ragged prompts on two slots, 24 new tokens, TF32 off.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from common import report

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from zoo import ARCHITECTURES, VOCAB_SIZE, build, ragged_prompts

BUDGET = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    prompts = ragged_prompts(VOCAB_SIZE, seed=11)
    table: dict[str, dict[str, Any]] = {}
    for name in ARCHITECTURES:
        model = build(name).to(device)
        expected = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=device)
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=BUDGET)
            expected.append(tuple(output[0, len(prompt) :].tolist()))
        row: dict[str, Any] = {}
        for capture in (False, "auto"):
            for route in ("packed", "equal_width", "per_prompt", "ordinary"):
                config = RolloutConfig(max_slots=2, prefill_route=route, capture=capture)
                batch = RolloutEngine(model, config=config).generate(prompts, SamplingConfig(max_new_tokens=BUDGET))
                equal = sum(c.token_ids == e for c, e in zip(batch.completions, expected, strict=True))
                captured = capture == "auto" and route != "ordinary" and batch.stats.eager_reason is None
                row[f"{route}, {'captured' if captured else 'eager'}"] = f"{equal}/{len(prompts)}"
        table[name] = row
        print(name, row)
    whole = all(value == f"{len(prompts)}/{len(prompts)}" for row in table.values() for value in row.values())
    report(f"parity-{device}", {"all equal": whole, "responses": table}, arguments.out)


if __name__ == "__main__":
    main()
