"""Greedy tokens of a real checkpoint on ten prompts, one of them long, against `model.generate`, in fp32 on the CPU.

    python benchmarks/real_model.py --model FOLDER [--out FOLDER] [--new-tokens N]

For a model with a sliding window the long prompt is longer than the window.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import report
from transformers import AutoModelForCausalLM, AutoTokenizer

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "The quick brown fox",
    "In 1969, the first",
    "A list of prime numbers: 2, 3, 5,",
    "Dear Sir or Madam,",
    "The meaning of life is",
    "The history of the village begins with a river. " * 60,
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--new-tokens", type=int, default=32)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=arguments.new_tokens, do_sample=False
        )
        expected.append(tuple(output[0, ids.shape[1] :].tolist()))
    sampling = SamplingConfig(max_new_tokens=arguments.new_tokens, temperature=0)
    equal: dict[str, str] = {}
    texts: list[Any] = []
    for route in ("packed", "equal_width", "per_prompt", "ordinary"):
        engine = RolloutEngine(model, tokenizer, RolloutConfig(prefill_route=route, max_slots=4))
        batch = engine.generate(PROMPTS, sampling)
        same = sum(c.token_ids == tokens for c, tokens in zip(batch.completions, expected, strict=True))
        equal[route] = f"{same}/{len(PROMPTS)}"
        texts = [completion.text for completion in batch.completions[:3]]
        print(route, equal[route])
    report(
        "real-model",
        {
            "model": type(model).__name__,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "window": getattr(model.config, "sliding_window", None),
            "prompt tokens": [len(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS],
            "new tokens": arguments.new_tokens,
            "equal responses": equal,
            "first responses": texts,
        },
        arguments.out,
    )


if __name__ == "__main__":
    main()
