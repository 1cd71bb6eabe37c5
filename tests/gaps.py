"""How far a response is from greedy, for dtypes in which two right ways of computing round differently."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def greedy_gap(model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int]) -> float:
    """Give the most by which a token of the response falls short of the largest logit, 0 for a greedy one.

    The logits are those of one forward over the whole sequence, so no token of the response is generated again.
    """
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(response)[:, None])[:, 0]
    return (logits.max(dim=-1).values - chosen).max().item()
