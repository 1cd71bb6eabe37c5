"""One sample of one prompt, from the queue to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from liveroll.completion import Completion, FinishReason
from liveroll.scheduling.details import Details
from liveroll.types import ResolvedSampling


@dataclass(eq=False)
class Request:
    """What is asked for, and how far it has come.

    That is written by `make_call`, then by the scheduler and its slots alone.

    Attributes:
        row: position in the result.
        prompt_index: position of the prompt in the call.
        sample_index: which of the prompt's samples this is.
        group: which distinct prompt of the call it has: requests of one group share what is run of it.
        prompt: int64 token ids `[P]`, those of `prefix` included.
        padding_ids: token ids at masked positions of a left-padded batch that belong to the history which the
            repetition penalty sees, where `model.generate` of the installed transformers lets it see them.
        sampling: resolved settings.
        stream: two 32-bit keys of the request's random stream.
        prefix: int64 forced tokens that the response begins with. They are run with the prompt, as a part of it.
        given_mask: uint8, one entry for each response token behind the prefix that was there before the call: 1 where
            an earlier call sampled it, 0 where it was forced.
        before: the completion that this request goes on with, if it is one.
        tokens: int64 response tokens `[R]` behind the prefix that are known so far.
        logprobs: float32 log-probabilities `[R]` of them.
        details: what else was asked for of them.
        finish_reason: None while it runs.
        stop: the token id or string that ended it.
        slot: the row of the running batch, while it runs.
        pages: its KV pages, in order of position.
        borrowed: how many of its pages, the first ones, another request has written; its own prefill leaves them.
    """

    row: int
    prompt_index: int
    sample_index: int
    group: int
    prompt: np.ndarray
    padding_ids: tuple[int, ...]
    sampling: ResolvedSampling
    stream: tuple[int, int]
    prefix: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    given_mask: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    before: Completion | None = None

    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    details: Details | None = None
    finish_reason: FinishReason | None = None
    stop: int | str | None = None
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    borrowed: int = 0

    @property
    def context(self) -> np.ndarray:
        """Prompt and response so far: what a prefill of this request runs over."""
        return np.concatenate([self.prompt, self.tokens]) if len(self.tokens) else self.prompt

    @property
    def response(self) -> np.ndarray:
        """The whole response so far, its prefix included."""
        return np.concatenate([self.prefix, self.tokens]) if len(self.prefix) else self.tokens

    @property
    def response_mask(self) -> bytes:
        """For each token of the whole response, 1 where it was sampled."""
        return bytes(len(self.prefix)) + self.given_mask.tobytes() + b"\1" * self.new

    @property
    def new(self) -> int:
        """Tokens that this call sampled."""
        return len(self.tokens) - len(self.given_mask)

    @property
    def length(self) -> int:
        """Tokens of the context."""
        return len(self.prompt) + len(self.tokens)

    @property
    def sampled(self) -> int:
        """Response tokens so far that were sampled, in this call or before it."""
        return len(self.tokens) - self._forced

    @property
    def left(self) -> int:
        """Tokens that may still be sampled."""
        return self.sampling.max_new_tokens - self.sampled

    @property
    def most_tokens(self) -> int:
        """Tokens behind the prefix that it can come to hold, forced ones included."""
        return self._forced + self.sampling.max_new_tokens

    @property
    def longest(self) -> int:
        """Most positions whose keys and values it can come to need: the last token is never fed back."""
        return len(self.prompt) + self.most_tokens - 1

    @property
    def _forced(self) -> int:
        return len(self.given_mask) and len(self.given_mask) - int(np.count_nonzero(self.given_mask))


def logits_complaint(request: Request) -> str:
    """What to tell of a request whose logits are not numbers."""
    return (
        f"the model's logits for prompt {request.prompt_index} are NaN, so nothing can be sampled; "
        "look for NaN or infinity in its weights"
    )
