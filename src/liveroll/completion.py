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
        raw_logprobs: natural log-probability of each token in the softmax of the model's own logits, untouched.
            None where not asked for.
        top_logprobs: for each token the most likely alternatives in the distribution it was drawn from, as pairs of
            token id and log-probability, the most likely first and of equal ones the lowest id first; fewer than
            asked for where fewer are possible. None where not asked for.
        kept_tokens: for each token the ids, ascending, among which top-k, top-p and min-p let it be drawn; None for a
            token where they are more than asked for. None where not asked for, or where nothing is truncated.
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
    raw_logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    kept_tokens: tuple[tuple[int, ...] | None, ...] | None = None
