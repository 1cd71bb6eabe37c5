"""Finished requests as a `RolloutBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from liveroll.completion import Completion
from liveroll.prompts import PromptBatch
from liveroll.scheduling.request import Request
from liveroll.types import ResolvedSampling, RolloutBatch, RolloutStats


def make_completion(request: Request, tokenizer: Any) -> Completion:
    """The completion of a finished request."""
    if request.finish_reason is None:
        raise ValueError(f"request {request.row} has not finished")
    tokens = tuple(request.tokens.tolist())
    with_logprobs = request.sampling.logprobs and len(request.logprobs) == len(tokens)
    return Completion(
        prompt_index=request.prompt_index,
        sample_index=request.sample_index,
        token_ids=tokens,
        text=None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True),
        logprobs=tuple(request.logprobs.tolist()) if with_logprobs else None,
        finish_reason=request.finish_reason,
        stop=request.stop,
    )


def make_batch(
    requests: Sequence[Request],
    prompts: PromptBatch,
    sampling: Sequence[ResolvedSampling],
    stats: RolloutStats,
    tokenizer: Any,
    device: torch.device,
) -> RolloutBatch:
    """The batch of finished requests, tensors on `device`."""
    width = max(len(request.tokens) for request in requests)
    source = torch.from_numpy(np.array([request.prompt_index for request in requests]))
    ids = np.zeros((len(requests), width), np.int64)
    mask = np.zeros_like(ids)
    for request in requests:
        count = len(request.tokens)
        ids[request.row] = request.sampling.pad_token_id
        ids[request.row, :count], mask[request.row, :count] = request.tokens, 1
    return RolloutBatch(
        completions=tuple(make_completion(request, tokenizer) for request in requests),
        input_ids=torch.cat([prompts.input_ids[source], torch.from_numpy(ids)], dim=1).to(device),
        attention_mask=torch.cat([prompts.attention_mask[source], torch.from_numpy(mask)], dim=1).to(device),
        response_start_idx=prompts.width,
        sampling=tuple(sampling),
        stats=stats,
    )
