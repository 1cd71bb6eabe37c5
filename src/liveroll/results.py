"""Finished requests as a `RolloutBatch`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from liveroll.completion import Completion
from liveroll.prompts import PromptBatch
from liveroll.scheduling.details import Details
from liveroll.scheduling.request import Request
from liveroll.types import ResolvedSampling, RolloutBatch, RolloutStats


def make_completion(request: Request, tokenizer: Any) -> Completion:
    """The completion of a finished request."""
    if request.finish_reason is None:
        raise ValueError(f"request {request.row} has not finished")
    tokens = tuple(request.tokens.tolist())
    sampling, details = request.sampling, request.details
    with_logprobs = sampling.logprobs and len(request.logprobs) == len(tokens)
    with_kept = sampling.kept_tokens and sampling.truncates
    return Completion(
        prompt_index=request.prompt_index,
        sample_index=request.sample_index,
        token_ids=tokens,
        text=None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True),
        logprobs=tuple(request.logprobs.tolist()) if with_logprobs else None,
        finish_reason=request.finish_reason,
        stop=request.stop,
        raw_logprobs=tuple(details.raw_logprobs.tolist()) if details and sampling.raw_logprobs else None,
        top_logprobs=_alternatives(details, sampling.top_logprobs) if details and sampling.top_logprobs else None,
        kept_tokens=_kept(details, sampling.kept_tokens) if details and with_kept else None,
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
    completions = tuple(make_completion(request, tokenizer) for request in requests)
    logprobs = _padded([completion.logprobs for completion in completions], width, device)
    raw_logprobs = _padded([completion.raw_logprobs for completion in completions], width, device)
    input_ids, attention_mask = torch.from_numpy(both).to(device)
    return RolloutBatch(
        completions=completions,
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_start_idx=start,
        sampling=tuple(sampling),
        response_logprobs=logprobs,
        response_raw_logprobs=raw_logprobs,
        stats=finish(),
    )


def _padded(rows: Sequence[Sequence[float] | None], width: int, device: torch.device) -> torch.Tensor | None:
    """Rows as `[N, width]` float32, 0 behind each; None where one is missing."""
    padded = np.zeros((len(rows), width), np.float32)
    for row, values in enumerate(rows):
        if values is None:
            return None
        padded[row, : len(values)] = values
    return torch.from_numpy(padded).to(device)


def _alternatives(details: Details, count: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    """For each token, the ids and log-probabilities of the most likely ones that were possible."""
    ids, logprobs = details.top_ids[:, :count].tolist(), details.top_logprobs[:, :count].tolist()
    return tuple(
        tuple((token, logprob) for token, logprob in zip(*row, strict=True) if logprob > -math.inf)
        for row in zip(ids, logprobs, strict=True)
    )


def _kept(details: Details, limit: int) -> tuple[tuple[int, ...] | None, ...]:
    """For each token, the ids that truncation kept; None where they are more than `limit`."""
    return tuple(
        tuple(ids.tolist()) if count <= limit else None
        for ids, count in zip(details.kept, details.kept_counts.tolist(), strict=True)
    )
