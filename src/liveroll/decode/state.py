"""The running batch on the device: one row of static tensors for each slot."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from liveroll.decode.upload import upload, upload_together
from liveroll.scheduling.request import Request

# More than any vocabulary holds: a larger top_k keeps all tokens too.
_ALL = 2**31 - 1


class Column(IntEnum):
    """Whole numbers kept of a slot."""

    TOKEN = 0  # the last token, not fed to the model yet
    POSITION = 1  # where that token stands
    REMAINING = 2  # tokens that may still be sampled
    HELD = 3  # tokens to be sampled before a stop token may be
    TOP_K = 4  # 0 keeps all
    SAMPLED = 5  # 0 takes the most likely token
    STREAM_LOW = 6
    STREAM_HIGH = 7


class Setting(IntEnum):
    """Real numbers kept of a slot."""

    TEMPERATURE = 0
    TAIL = 1  # 1 - top_p, rounded once as in transformers
    MIN_P = 2
    PENALTY = 3


class RowState:
    """Tensors over slots, all written by `admit` and by the step's `advance`, and by nothing else.

    The slot behind the last is inert: its budget is spent, so that it may stand in a step for no row at all.

    Args:
        slots: rows of the running batch.
        table_width: pages that a row may hold.
        stop_width: stop tokens that a row may have.
        vocab_size: V.
        device: where the tensors live.
    """

    def __init__(self, slots: int, *, table_width: int, stop_width: int, vocab_size: int, device: torch.device) -> None:
        self.slots = slots
        self.inert = slots
        self.numbers = torch.zeros(slots + 1, len(Column), dtype=torch.int64, device=device)
        self.settings = torch.ones(slots + 1, len(Setting), dtype=torch.float32, device=device)
        self.stops = torch.full((slots + 1, stop_width), -1, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(slots + 1, table_width, dtype=torch.int32, device=device)
        self.seen: Tensor | None = None
        self._vocab_size = vocab_size

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        held = [self.numbers, self.settings, self.stops, self.block_table]
        return sum(tensor.nbytes for tensor in held) + (0 if self.seen is None else self.seen.nbytes)

    def keep_histories(self) -> None:
        """From now on, keep which tokens each row has seen, `[slots, V]` bool, for penalties."""
        if self.seen is None:
            shape = (self.slots + 1, self._vocab_size)
            self.seen = torch.zeros(shape, dtype=torch.bool, device=self.numbers.device)

    def admit(self, requests: Sequence[Request]) -> Tensor:
        """Set up the slots of requests as their prefill leaves them; `[N]` int64 slots on the device.

        The last token of the context counts as fed: the next `advance` moves on from it.
        """
        device = self.numbers.device
        numbers = np.array([_numbers(r) for r in requests], np.int64)
        settings = np.array([_settings(r) for r in requests], np.float32)
        stops = np.full((len(requests), self.stops.shape[1]), -1, np.int64)
        for row, request in enumerate(requests):
            stops[row, : len(request.sampling.stop_token_ids)] = request.sampling.stop_token_ids
        rows = np.array([r.slot for r in requests], np.int64)
        slots, numbers_there, settings_there, stops_there = upload_together([rows, numbers, settings, stops], device)
        self.numbers[slots], self.settings[slots], self.stops[slots] = numbers_there, settings_there, stops_there
        if self.seen is not None:
            self.seen[slots] = False
            histories = [np.concatenate([r.context, np.array(r.padding_ids, np.int64)]) for r in requests]
            owners = np.repeat([r.slot for r in requests], [len(history) for history in histories])
            owner, token = upload(np.stack([owners, np.concatenate(histories)]), device)
            self.seen[owner, token] = True
        return slots

    def load_table(self, block_table: np.ndarray) -> None:
        """Copy the pages of the first slots, `[slots, pages]` int32."""
        rows, pages = block_table.shape
        self.block_table[:rows, :pages] = upload(block_table, self.block_table.device)


def _numbers(request: Request) -> list[int]:
    sampling, done = request.sampling, len(request.tokens)
    row = [0] * len(Column)
    row[Column.POSITION] = len(request.prompt) + done - 1
    row[Column.REMAINING] = sampling.max_new_tokens - done
    row[Column.HELD] = max(sampling.min_new_tokens - done, 0)
    row[Column.TOP_K] = min(sampling.top_k, _ALL) if sampling.do_sample else 0
    row[Column.SAMPLED] = sampling.do_sample
    row[Column.STREAM_LOW], row[Column.STREAM_HIGH] = request.stream
    return row


def _settings(request: Request) -> list[float]:
    sampling = request.sampling
    row = [1.0] * len(Setting)
    row[Setting.TAIL] = row[Setting.MIN_P] = 0.0
    if sampling.do_sample:
        row[Setting.TEMPERATURE] = sampling.temperature
        row[Setting.TAIL] = 1 - sampling.top_p
        row[Setting.MIN_P] = sampling.min_p
    row[Setting.PENALTY] = sampling.repetition_penalty
    return row
