"""One response to a prompt: what a call returns, and what a later call can go on with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from liveroll.errors import PromptError

FinishReason = Literal["stop", "length", "aborted"]

BLANKS: dict[str, Any] = {"logprobs": 0.0, "raw_logprobs": 0.0, "top_logprobs": (), "kept_tokens": None}
"""Everything that is told of each token on request, and what it is for a forced one."""


@dataclass(frozen=True)
class Completion:
    """One response.

    It holds all that `RolloutEngine.generate(continue_from=...)` needs to go on with it, in this process or another:
    it can be pickled, and `Completion(**fields)` makes it again of the fields that `dataclasses.asdict` gives, also
    after they went through JSON.

    Attributes:
        prompt_index: position of the prompt in the call.
        sample_index: which of the prompt's `n` samples this is.
        token_ids: the response, forced tokens and the stop token included. Where a stop string ended it, the last
            token is the one in which the string completed.
        text: the response decoded, special tokens skipped; None without a tokenizer, and after `extend`. Where a stop
            string ended it, the text ends with the string, or before it if `include_stop` is False.
        logprobs: natural log-probability of each token in the distribution it was drawn from (after penalties,
            temperature and filters), with the weights of that time; for a greedy response, of the distribution after
            penalties. 0.0 for a forced token. None where not asked for.
        finish_reason: `stop` (a stop token or string), `length` (the budget) or `aborted` (by `abort`, or by a limit
            of the whole call).
        stop: the token id or string that ended it, if one did.
        sampled_mask: for each token, 1 if the model sampled it and 0 if it was forced.
        continued_at: numbers of tokens that were there when later calls went on with it, ascending: those before the
            last of them were sampled by earlier calls, so perhaps with older weights.
        prompt_ids: the prompt.
        padding_ids: token ids at masked positions of the padded batch that the prompt was given in. transformers
            before 5.23 counts them as history for the repetition penalty.
        stream: keys of its random stream; None where `model.generate` drew it, as the fallback.
        raw_logprobs: natural log-probability of each token in the softmax of the model's own logits, untouched; 0.0
            for a forced token. None where not asked for.
        top_logprobs: for each token the most likely alternatives in the distribution it was drawn from, as pairs of
            token id and log-probability, the most likely first and of equal ones the lowest id first; fewer than
            asked for where fewer are possible, none for a forced token. None where not asked for.
        kept_tokens: for each token the ids, ascending, among which top-k, top-p and min-p let it be drawn; None for a
            token where they are more than asked for, and for a forced token. None where not asked for, or where
            nothing is truncated.
    """

    prompt_index: int
    sample_index: int
    token_ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason
    stop: int | str | None
    sampled_mask: tuple[int, ...] = field(repr=False)
    continued_at: tuple[int, ...]
    prompt_ids: tuple[int, ...] = field(repr=False)
    padding_ids: tuple[int, ...] = field(repr=False, compare=False)
    stream: tuple[int, int] | None = field(repr=False, compare=False)
    raw_logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    kept_tokens: tuple[tuple[int, ...] | None, ...] | None = None

    def __post_init__(self) -> None:
        if list in map(type, vars(self).values()):
            for name, value in vars(self).items():
                object.__setattr__(self, name, _without_lists(value))

    @property
    def sampled_tokens(self) -> int:
        """How many of the tokens the model sampled: those that `max_new_tokens` counts."""
        return sum(self.sampled_mask)

    def extend(self, token_ids: Iterable[int]) -> Completion:
        """The completion with forced tokens behind it, such as a tool's output, for a call to go on with.

        Args:
            token_ids: the tokens.

        Returns:
            An unfinished completion, its finish reason `aborted`. It has no text until a call goes on with it.

        Raises:
            PromptError: the tokens are not whole numbers from 0 on.
        """
        if not isinstance(token_ids, Iterable):
            raise PromptError(f"a completion is extended by a list of token ids, and {token_ids!r} is none")
        forced = tuple(token_ids)
        for token in forced:
            if isinstance(token, bool) or not hasattr(token, "__index__") or token < 0:
                raise PromptError(f"a completion is extended by token ids, and {token!r} is none")
        forced = tuple(map(int, forced))
        longer = {
            name: values + (blank,) * len(forced)
            for name, blank in BLANKS.items()
            if (values := getattr(self, name)) is not None
        }
        return replace(
            self,
            token_ids=self.token_ids + forced,
            text=None,
            finish_reason="aborted",
            stop=None,
            sampled_mask=self.sampled_mask + (0,) * len(forced),
            **longer,
        )


def _without_lists(value: Any) -> Any:
    """Tuples in place of the lists that JSON makes of them."""
    return tuple(map(_without_lists, value)) if isinstance(value, list) else value
