"""Finished requests as a `RolloutBatch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    finish: Callable[[], RolloutStats],
    tokenizer: Any,
    device: torch.device,
) -> RolloutBatch:
    """The batch of finished requests, tensors on `device`.

    `finish` gives the statistics. It is called last, since making the batch is part of what they time.
    """
    start, width = prompts.width, max(len(request.tokens) for request in requests)
    source = np.array([request.prompt_index for request in requests])
    both = np.zeros((2, len(requests), start + width), np.int64)
    ids, mask = both
    ids[:, :start], mask[:, :start] = prompts.input_ids.numpy()[source], prompts.attention_mask.numpy()[source]
    for request in requests:
        end = start + len(request.tokens)
        ids[request.row, start:end], ids[request.row, end:] = request.tokens, request.sampling.pad_token_id
        mask[request.row, start:end] = 1
    input_ids, attention_mask = torch.from_numpy(both).to(device)
    return RolloutBatch(
        completions=tuple(make_completion(request, tokenizer) for request in requests),
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_start_idx=start,
        sampling=tuple(sampling),
        stats=finish(),
    )
