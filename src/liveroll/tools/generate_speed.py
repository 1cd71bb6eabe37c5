"""The yardstick: how fast `model.generate` answers the same prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any


def time_generate(model: Any, tokenizer: Any, prompts: Sequence[str], n: int, max_new_tokens: int) -> tuple[int, float]:
    """Sample from the unfiltered distribution with `model.generate`, all prompts in one padded batch.

    Tokenizing counts, as it does for the engine; decoding the answers to text, which the engine does as well, is
    left out in favour of `generate`.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer, padding on the left.
        prompts: what to answer.
        n: samples of each prompt.
        max_new_tokens: tokens to generate, at most.

    Returns:
        The tokens generated, end tokens included and padding after them not, and the seconds it took.
    """
    started = time.perf_counter()
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True).to(model.device)
    output = model.generate(
        **inputs,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=n,
        max_new_tokens=max_new_tokens,
    )
    responses = output[:, inputs["input_ids"].shape[1] :]
    seconds = time.perf_counter() - started
    ends = (responses == model.generation_config.eos_token_id).long()
    ends_before = ends.cumsum(dim=1) - ends
    return int((ends_before == 0).sum()), seconds
