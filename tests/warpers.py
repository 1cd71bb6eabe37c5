"""The exact sampling distribution of `model.generate`, made of transformers' own processors."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def warped_scores(
    logits: torch.Tensor,
    history: list[int],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> torch.Tensor:
    """Give the scores whose softmax `model.generate(do_sample=True, ...)` draws the next token from.

    The order is that of `GenerationMixin`, the same in transformers 4.57 and 5: repetition penalty,
    temperature, top-k, top-p, min-p, each left out at its neutral value.

    Args:
        logits: `[V]`, the model's logits of the last position in any floating dtype.
        history: ids of the prompt and of the response so far, without padding.
        temperature: above 0.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        min_p: 0 keeps all.
        repetition_penalty: 1 penalizes nothing.

    Returns:
        `[V]` fp32, -inf for tokens filtered out.
    """
    steps = LogitsProcessorList()
    if repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(float(repetition_penalty)))
    if temperature != 1.0:
        steps.append(TemperatureLogitsWarper(float(temperature)))
    if top_k != 0:
        steps.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        steps.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        steps.append(MinPLogitsWarper(min_p))
    return steps(torch.tensor([history]), logits.float()[None].clone())[0]


def warped_probs(logits: torch.Tensor, history: list[int], **settings: Any) -> torch.Tensor:
    """Give the softmax of `warped_scores`: `[V]` fp32 probabilities, 0 for tokens filtered out."""
    return warped_scores(logits, history, **settings).softmax(dim=-1)
