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
    stops = state.stops[slots]
    live = numbers[:, Column.REMAINING] > 0
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
        stops=stops,
        held=numbers[:, Column.HELD] > 0,
    )
    tokens, logprobs = sample(logits, rows, variant)
    stopped = (tokens[:, None] == stops).any(dim=1)
    remaining = torch.where(stopped, 0, numbers[:, Column.REMAINING] - 1)

    moved = numbers.clone()
    moved[:, Column.TOKEN] = tokens
    moved[:, Column.POSITION] += 1
    moved[:, Column.REMAINING] = remaining
    moved[:, Column.HELD] = (numbers[:, Column.HELD] - 1).clamp(min=0)
    state.numbers[slots] = torch.where(live[:, None], moved, numbers)
    if seen is not None:
        # One flat index: assigning a scalar by index copies it from the host, which a graph cannot.
        seen.view(-1).index_fill_(0, slots * seen.shape[1] + tokens, True)

    outcome = torch.where(remaining > 0, int(Outcome.RUNNING), int(Outcome.SPENT))
    outcome = torch.where(stopped, int(Outcome.STOPPED), outcome)
    outcome = torch.where(live, outcome, int(Outcome.IDLE))
    return torch.stack([tokens.int(), outcome.int(), logprobs.view(torch.int32)])
