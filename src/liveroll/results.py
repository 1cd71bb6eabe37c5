"""Finished requests as a `RolloutBatch`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from liveroll.completion import BLANKS, Completion
from liveroll.prompts import PromptBatch
from liveroll.scheduling.details import Details
from liveroll.scheduling.request import Request
from liveroll.stopping import decode, text_until
from liveroll.types import ResolvedSampling, RolloutBatch, RolloutStats


def make_completion(request: Request, prompts: PromptBatch, tokenizer: Any, *, has_stream: bool = True) -> Completion:
    """The completion of a finished request; one that was finished before the call is returned as it was.

    Args:
        request: the request.
        prompts: those of its call.
        tokenizer: decodes the text; None for no text.
        has_stream: whether it was drawn from its random stream.
    """
    if request.finish_reason is None:
        raise ValueError(f"request {request.row} has not finished")
    before, sampled = request.before, request.new
    if before is not None and not sampled and before.finish_reason == request.finish_reason != "aborted":
        return replace(before, prompt_index=request.prompt_index)
    tokens = tuple(request.response.tolist())
    given = len(tokens) - sampled
    continued_at: tuple[int, ...] = () if before is None else before.continued_at
    if before is not None and given and sampled:
        continued_at += (given,)
    return Completion(
        prompt_index=request.prompt_index,
        sample_index=request.sample_index,
        token_ids=tokens,
        text=None if tokenizer is None else _text(request, tokens, tokenizer),
        finish_reason=request.finish_reason,
        stop=request.stop,
        sampled_mask=tuple(request.response_mask),
        continued_at=continued_at,
        prompt_ids=prompts.ids[request.prompt_index],
        padding_ids=prompts.padding_ids[request.prompt_index],
        stream=request.stream if has_stream else None,
        **_told(request, given, sampled),
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
    responses = [request.response for request in requests]
    lengths = np.array([len(response) for response in responses], np.int64)
    start, width = prompts.width, int(lengths.max(initial=0))
    source = np.array([request.prompt_index for request in requests], np.int64)
    written = np.arange(width) < lengths[:, None]
    grids = np.zeros((3, len(requests), start + width), np.int64)
    ids, mask, sampled = grids
    ids[:, :start], mask[:, :start] = prompts.input_ids.numpy()[source], prompts.attention_mask.numpy()[source]
    if requests:
        ids[:, start:] = np.array([[request.sampling.pad_token_id] for request in requests])
        ids[:, start:][written] = np.concatenate(responses)
        mask[:, start:] = written
        sampled[:, start:][written] = np.frombuffer(b"".join(request.response_mask for request in requests), np.uint8)
    # Where the call was handed on, `generate` kept the settings to itself, and drew from no stream of the engine's.
    drawn = bool(sampling)
    completions = tuple(make_completion(request, prompts, tokenizer, has_stream=drawn) for request in requests)
    # Tensors made in the caller's inference mode could take no part in a loss.
    with torch.inference_mode(False):
        logprobs = _padded(requests, completions, "logprobs", width, device)
        raw_logprobs = _padded(requests, completions, "raw_logprobs", width, device)
        input_ids, attention_mask, loss_mask = torch.from_numpy(grids).to(device)
        loss_mask = loss_mask[:, start:]
    return RolloutBatch(
        completions=completions,
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_start_idx=start,
        loss_mask=loss_mask,
        sampling=tuple(sampling),
        response_logprobs=logprobs,
        response_raw_logprobs=raw_logprobs,
        stats=finish(),
    )


def _told(request: Request, given: int, sampled: int) -> dict[str, Any]:
    """What was asked for of each token: of those that were given, what is told in the completion of before."""
    told: dict[str, Any] = dict.fromkeys(BLANKS)
    for name in request.sampling.told:
        blank = (BLANKS[name],) * given
        front = blank if request.before is None else getattr(request.before, name) or blank
        values = _told_by_the_call(request, name) if sampled else ()
        told[name] = front + values[len(values) - sampled :]
    return told


def _told_by_the_call(request: Request, name: str) -> tuple[Any, ...]:
    """What the call tells of its tokens; those that it sampled are the last."""
    if name in ("logprobs", "raw_logprobs"):
        return tuple(_logprobs(request, name).tolist())
    details = request.details
    assert details is not None
    if name == "top_logprobs":
        return _alternatives(details, request.sampling.top_logprobs)
    return _kept(details, request.sampling.kept_tokens)


def _logprobs(request: Request, name: str) -> np.ndarray:
    """`logprobs` or `raw_logprobs` of the tokens behind the prefix, float32."""
    if name == "logprobs":
        return request.logprobs
    assert request.details is not None
    return request.details.raw_logprobs


def _padded(
    requests: Sequence[Request], completions: Sequence[Completion], name: str, width: int, device: torch.device
) -> torch.Tensor | None:
    """What completions tell of their tokens as `[N, width]` float32, 0 behind each; None where one tells nothing."""
    padded = np.zeros((len(requests), width), np.float32)
    for row, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        told = getattr(completion, name)
        if told is None:
            return None
        # Of what this call sampled there is an array, which is copied many times faster than a tuple.
        values = _logprobs(request, name) if request.new and request.before is None else told
        padded[row, len(told) - len(values) : len(told)] = values
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


def _text(request: Request, tokens: tuple[int, ...], tokenizer: Any) -> str:
    if isinstance(request.stop, str):
        return text_until(tokenizer, tokens, request.stop, include=request.sampling.include_stop)
    return decode(tokenizer, tokens)
