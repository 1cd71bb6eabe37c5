"""The running batch on the device: one row of static tensors for each slot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from liveroll.decode.adjustments import ABSENT, adjustments_of
from liveroll.decode.upload import upload, upload_together
from liveroll.scheduling.request import Request

# More than any vocabulary holds: a larger top_k keeps all tokens too.
_ALL = 2**31 - 1

IN_PROMPT, IN_RESPONSE = 1, 2
"""What a token's history counts up by where it stands in the prompt, and each time it stands in the response."""


class Column(IntEnum):
    """Whole numbers kept of a slot."""

    TOKEN = 0  # the last token, not fed to the model yet
    POSITION = 1  # where that token stands
    REMAINING = 2  # tokens that may still be sampled
    DONE = 3  # tokens of the response so far
    TOP_K = 4  # 0 keeps all
    SAMPLED = 5  # 0 takes the most likely token
    STREAM_LOW = 6
    STREAM_HIGH = 7


class Setting(IntEnum):
    """Real numbers kept of a slot."""

    SHARPNESS = 0  # 1 / temperature: a product is the same to the last bit wherever it is computed, and fast
    TAIL = 1  # 1 - top_p, rounded once as in transformers
    LEAST = 2  # log(min_p)
    REPETITION = 3
    PRESENCE = 4
    FREQUENCY = 5


NEUTRAL = (1.0, 0.0, -math.inf, 1.0, 0.0, 0.0)
"""The value of each setting that changes nothing."""


class RowState:
    """Tensors over slots, all written by `admit` and by the step's `advance`, and by nothing else.

    The slot behind the last is inert: its budget is spent, so that it may stand in a step for no row at all.

    Args:
        slots: rows of the running batch.
        table_width: pages that a row may hold.
        stop_width: stop tokens that a row may have.
        adjusted_width: tokens that a row may bias, forbid or hold back.
        vocab_size: V.
        sampled_size: ids below this may be sampled; V if None.
        device: where the tensors live.
    """

    def __init__(
        self,
        slots: int,
        *,
        table_width: int,
        stop_width: int,
        adjusted_width: int = 1,
        vocab_size: int,
        sampled_size: int | None = None,
        device: torch.device,
    ) -> None:
        self.slots = slots
        self.inert = slots
        self.sampled_size = min(sampled_size or vocab_size, vocab_size)
        self.numbers = torch.zeros(slots + 1, len(Column), dtype=torch.int64, device=device)
        self.settings = torch.tensor([NEUTRAL] * (slots + 1), dtype=torch.float32, device=device)
        self.stops = torch.full((slots + 1, stop_width), -1, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(slots + 1, table_width, dtype=torch.int32, device=device)
        # Tokens whose scores are adjusted, ascending; what is added to each; and until how many tokens are sampled it
        # may not be sampled at all.
        self.adjusted = torch.full((slots + 1, adjusted_width), ABSENT, dtype=torch.int32, device=device)
        self.bias = torch.zeros(slots + 1, adjusted_width, dtype=torch.float32, device=device)
        self.until = torch.zeros(slots + 1, adjusted_width, dtype=torch.int32, device=device)
        self.history: Tensor | None = None
        self._vocab_size = vocab_size

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        held = [self.numbers, self.settings, self.stops, self.block_table, self.adjusted, self.bias, self.until]
        return sum(tensor.nbytes for tensor in held) + (0 if self.history is None else self.history.nbytes)

    def keep_histories(self) -> None:
        """From now on, count what each row has seen, `[slots, V]` int32, for penalties; and adjust scores."""
        if self.history is None:
            shape = (self.slots + 1, self._vocab_size)
            self.history = torch.zeros(shape, dtype=torch.int32, device=self.numbers.device)

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
        if self.history is not None:
            self._admit_adjustments(slots, requests)
            self._admit_histories(slots, requests, self.history)
        return slots

    def load_table(self, block_table: np.ndarray) -> None:
        """Copy the pages of the first slots, `[slots, pages]` int32."""
        rows, pages = block_table.shape
        self.block_table[:rows, :pages] = upload(block_table, self.block_table.device)

    def _admit_adjustments(self, slots: Tensor, requests: Sequence[Request]) -> None:
        shape = (len(requests), self.adjusted.shape[1])
        adjusted, bias, until = np.full(shape, ABSENT, np.int32), np.zeros(shape, np.float32), np.zeros(shape, np.int32)
        distinct = {id(r.sampling): adjustments_of(r.sampling) for r in requests}
        for row, request in enumerate(requests):
            found = distinct[id(request.sampling)]
            count = len(found.tokens)
            adjusted[row, :count], bias[row, :count], until[row, :count] = found.tokens, found.bias, found.until
        moved = upload_together([adjusted, bias, until], slots.device)
        self.adjusted[slots], self.bias[slots], self.until[slots] = moved

    def _admit_histories(self, slots: Tensor, requests: Sequence[Request], history: Tensor) -> None:
        history[slots] = 0
        seen = [np.concatenate([r.prompt, np.array(r.padding_ids, np.int64)]) for r in requests]
        for parts, amount in ((seen, IN_PROMPT), ([r.tokens for r in requests], IN_RESPONSE)):
            owners = np.repeat([r.slot for r in requests], [len(part) for part in parts])
            owner, token = upload(np.stack([owners, np.concatenate(parts)]).astype(np.int64), slots.device)
            # The prompt is marked, however often a token stands in it; the response is counted.
            counted = torch.full_like(token, amount, dtype=torch.int32)
            history.index_put_((owner, token), counted, accumulate=amount == IN_RESPONSE)


def _numbers(request: Request) -> list[int]:
    sampling = request.sampling
    row = [0] * len(Column)
    row[Column.POSITION] = request.length - 1
    row[Column.REMAINING] = request.left
    row[Column.DONE] = request.sampled
    row[Column.TOP_K] = min(sampling.top_k, _ALL) if sampling.do_sample else 0
    row[Column.SAMPLED] = sampling.do_sample
    row[Column.STREAM_LOW], row[Column.STREAM_HIGH] = request.stream
    return row


def _settings(request: Request) -> list[float]:
    sampling = request.sampling
    row = list(NEUTRAL)
    if sampling.do_sample:
        row[Setting.SHARPNESS] = 1 / sampling.temperature
        row[Setting.TAIL] = 1 - sampling.top_p
        row[Setting.LEAST] = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    row[Setting.REPETITION] = sampling.repetition_penalty
    row[Setting.PRESENCE] = sampling.presence_penalty
    row[Setting.FREQUENCY] = sampling.frequency_penalty
    return row
