"""One response to a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True)
class Completion:
    """One response.

    Attributes:
        prompt_index: position of the prompt in the call.
        sample_index: which of the prompt's `n` samples this is.
        token_ids: the response, its stop token included.
        text: the response decoded, special tokens skipped; None without a tokenizer.
        logprobs: natural log-probability of each token in the distribution it was drawn from (after penalties,
            temperature and filters); for a greedy response, of the distribution after penalties. None where
            not asked for.
        finish_reason: `stop` (a stop token or string), `length` (the budget) or `aborted`.
        stop: the token id or string that ended it, if one did.
    """

    prompt_index: int
    sample_index: int
    token_ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason
    stop: int | str | None
