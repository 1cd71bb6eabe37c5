"""`warped_probs` is the distribution that `model.generate` draws from, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from warpers import warped_probs

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0},
    {"temperature": 0.7, "top_k": 0, "top_p": 1.0},
    {"temperature": 1.3, "top_k": 5, "top_p": 1.0},
    {"temperature": 1.5, "top_k": 0, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.4},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 0.8},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(map(str, settings.values())))
def test_equals_the_scores_of_generate(settings: dict[str, Any]) -> None:
    """Filters in another order, or a penalty without the prompt, give another distribution."""
    model = zoo.shared("llama")
    prompt = zoo.ragged_prompts(zoo.VOCAB_SIZE, 0)[3]
    torch.manual_seed(0)
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=True,
        max_new_tokens=12,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **settings,
    )
    sequence = out.sequences[0].tolist()
    for step, (logits, scores) in enumerate(zip(out.logits, out.scores, strict=True)):
        probs = warped_probs(logits[0], sequence[: len(prompt) + step], **settings)
        assert torch.equal(probs, scores.softmax(dim=-1)[0])
        assert probs[sequence[len(prompt) + step]] > 0
