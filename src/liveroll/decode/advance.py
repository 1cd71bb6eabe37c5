"""The end of every step: sample, move each row on by one token, and report."""

from __future__ import annotations

import torch
from torch import Tensor

from liveroll.decode.sampler import Variant, sample
from liveroll.decode.state import IN_RESPONSE, Column, RowState
from liveroll.scheduling.details import NOTHING, Wanted
from liveroll.scheduling.plan import Outcome


def advance(state: RowState, slots: Tensor, logits: Tensor, variant: Variant, wanted: Wanted = NOTHING) -> Tensor:
    """Sample the next token of each slot and move the slot on to it.

    A row whose budget was spent before, or that stopped before, is frozen: it reports IDLE and stays as it is.

    Args:
        state: the running batch.
        slots: `[B]` int64.
        logits: `[B, V]`.
        variant: how much of sampling to run.
        wanted: what to report besides.

    Returns:
        `[3 + wanted.rows, B]` int32: tokens, `Outcome` codes, the bits of the float32 log-probabilities, and details
        as `Wanted.read` takes them.
    """
    drawn = sample(logits, state, slots, variant, wanted)
    history = state.history if variant is Variant.FULL else None
    if state.numbers.is_cuda:
        from liveroll.kernels.move import move as move_fused

        report = move_fused(state.numbers, state.stops, slots, drawn.tokens, drawn.logprobs, history)
    else:
        report = move(state.numbers, state.stops, slots, drawn.tokens, drawn.logprobs, history)
    return report if drawn.details is None else torch.cat([report, drawn.details])


def move(
    numbers: Tensor, stops: Tensor, slots: Tensor, tokens: Tensor, logprobs: Tensor, history: Tensor | None
) -> Tensor:
    """Move each slot on to the token that it sampled; frozen ones stay as they are.

    Args:
        numbers: `[slots, columns]` int64 of the running batch, changed in place.
        stops: `[slots, S]` int64 stop tokens, -1 for none.
        slots: `[B]` int64.
        tokens: `[B]` int64.
        logprobs: `[B]` float32.
        history: `[slots, V]` int32, changed in place, or None.

    Returns:
        The first rows of the report of `advance`, `[3, B]` int32.
    """
    before = numbers[slots]
    live = before[:, Column.REMAINING] > 0
    stopped = (tokens[:, None] == stops[slots]).any(dim=1)
    remaining = torch.where(stopped, 0, before[:, Column.REMAINING] - 1)
    moved = before.clone()
    moved[:, Column.TOKEN] = tokens
    moved[:, Column.POSITION] += 1
    moved[:, Column.DONE] += 1
    moved[:, Column.REMAINING] = remaining
    numbers[slots] = torch.where(live[:, None], moved, before)
    if history is not None:
        history.index_put_((slots, tokens), live.int() * IN_RESPONSE, accumulate=True)
    outcome = torch.where(remaining > 0, int(Outcome.RUNNING), int(Outcome.SPENT))
    outcome = torch.where(stopped, int(Outcome.STOPPED), outcome)
    outcome = torch.where(live, outcome, int(Outcome.IDLE))
    return torch.stack([tokens.int(), outcome.int(), logprobs.view(torch.int32)])
