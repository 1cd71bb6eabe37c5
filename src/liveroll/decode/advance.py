"""The end of every step: sample, move each row on by one token, and report."""

from __future__ import annotations

import torch
from torch import Tensor

from liveroll.decode.sampler import Rows, Variant, sample
from liveroll.decode.state import Column, RowState, Setting
from liveroll.scheduling.plan import Outcome


def advance(state: RowState, slots: Tensor, logits: Tensor, variant: Variant) -> Tensor:
    """Sample the next token of each slot and move the slot on to it.

    A row whose budget was spent before, or that stopped before, is frozen: it reports IDLE and stays as it is.

    Args:
        state: the running batch.
        slots: `[B]` int64.
        logits: `[B, V]`.
        variant: how much of sampling to run.

    Returns:
        `[3, B]` int32: tokens, `Outcome` codes, and the bits of the float32 log-probabilities.
    """
    seen = state.seen if variant is Variant.FULL else None
    numbers, settings = state.numbers[slots], state.settings[slots]
    rows = Rows(
        position=numbers[:, Column.POSITION] + 1,
        stream=numbers[:, Column.STREAM_LOW : Column.STREAM_HIGH + 1],
        sampled=numbers[:, Column.SAMPLED] != 0,
        temperature=settings[:, Setting.TEMPERATURE],
        top_k=numbers[:, Column.TOP_K],
        tail=settings[:, Setting.TAIL],
        min_p=settings[:, Setting.MIN_P],
        penalty=settings[:, Setting.PENALTY],
        seen=None if seen is None else seen[slots],
        stops=state.stops[slots],
        held=numbers[:, Column.HELD] > 0,
    )
    tokens, logprobs = sample(logits, rows, variant)
    if seen is not None:
        # One flat index: assigning a scalar by index copies it from the host, which a graph cannot.
        seen.view(-1).index_fill_(0, slots * seen.shape[1] + tokens, True)
    if numbers.is_cuda:
        from liveroll.kernels.move import move as move_fused

        return move_fused(state.numbers, state.stops, slots, tokens, logprobs)
    return move(state.numbers, state.stops, slots, tokens, logprobs)


def move(numbers: Tensor, stops: Tensor, slots: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
    """Move each slot on to the token that it sampled; frozen ones stay as they are.

    Args:
        numbers: `[slots, columns]` int64 of the running batch, changed in place.
        stops: `[slots, S]` int64 stop tokens, -1 for none.
        slots: `[B]` int64.
        tokens: `[B]` int64.
        logprobs: `[B]` float32.

    Returns:
        The report of `advance`.
    """
    before = numbers[slots]
    live = before[:, Column.REMAINING] > 0
    stopped = (tokens[:, None] == stops[slots]).any(dim=1)
    remaining = torch.where(stopped, 0, before[:, Column.REMAINING] - 1)
    moved = before.clone()
    moved[:, Column.TOKEN] = tokens
    moved[:, Column.POSITION] += 1
    moved[:, Column.REMAINING] = remaining
    moved[:, Column.HELD] = (before[:, Column.HELD] - 1).clamp(min=0)
    numbers[slots] = torch.where(live[:, None], moved, before)
    outcome = torch.where(remaining > 0, int(Outcome.RUNNING), int(Outcome.SPENT))
    outcome = torch.where(stopped, int(Outcome.STOPPED), outcome)
    outcome = torch.where(live, outcome, int(Outcome.IDLE))
    return torch.stack([tokens.int(), outcome.int(), logprobs.view(torch.int32)])
