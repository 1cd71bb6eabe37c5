"""Rows to sample for, without a model: settings and histories in slots, admitted as the engine does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from fake_device import make_request

from liveroll.decode.adjustments import most_adjusted
from liveroll.decode.state import Column, RowState
from liveroll.scheduling.request import Request


def request_with(
    prompt: Sequence[int] = (0, 3, 3, 7), response: Sequence[int] = (), *, sampled: bool = True, **setting: Any
) -> Request:
    """A request with this prompt and this response so far; `setting` are fields of `ResolvedSampling`."""
    request = make_request(0, 1, 99)
    request.prompt, request.tokens = np.array(prompt, np.int64), np.array(response, np.int64)
    request.sampling = replace(request.sampling, do_sample=sampled, **setting)
    return request


def admitted(requests: Sequence[Request], vocab: int, sampled_size: int | None = None) -> tuple[RowState, torch.Tensor]:
    """The running batch of requests, one slot each, whose streams count up; and the slots."""
    for slot, request in enumerate(requests):
        request.slot, request.stream = slot, (slot, 5)
    state = RowState(
        len(requests),
        table_width=1,
        stop_width=max(1, *(len(request.sampling.stop_token_ids) for request in requests)),
        adjusted_width=max(1, most_adjusted(request.sampling for request in requests)),
        vocab_size=vocab,
        sampled_size=sampled_size,
        device=torch.device("cpu"),
    )
    state.keep_histories()
    return state, state.admit(requests)


def moved(state: RowState, device: torch.device) -> RowState:
    """The same rows, moved to a device."""
    for name, value in vars(state).items():
        if isinstance(value, torch.Tensor):
            setattr(state, name, value.to(device))
    return state


def repeated(
    request: Request, count: int, vocab: int, sampled_size: int | None = None
) -> tuple[RowState, torch.Tensor]:
    """The same row `count` times, each with a stream of its own."""
    state, _ = admitted([request], vocab, sampled_size)
    for name, value in vars(state).items():
        if isinstance(value, torch.Tensor):
            setattr(state, name, value[:1].repeat(count, *[1] * (value.dim() - 1)))
    state.numbers[:, Column.STREAM_LOW] = torch.arange(count)
    return state, torch.arange(count)
