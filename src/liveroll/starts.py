"""What a call is given of responses: completions to go on with, and prefixes for new ones to begin with."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, get_args

import numpy as np

from liveroll.completion import BLANKS, Completion, FinishReason
from liveroll.errors import ConfigError, PromptError
from liveroll.prompts import PromptBatch, pad_prompts, read_prompts, read_token_ids
from liveroll.types import RolloutBatch, RolloutRequest

ContinueFrom = RolloutBatch | Sequence[Completion]
ResponsePrefix = str | Sequence[int] | Sequence[str | Sequence[int] | None]


@dataclass(frozen=True)
class Start:
    """What is given of the responses to one prompt; nothing where they are all new.

    Attributes:
        continued: completions to go on with, in ascending order of their samples.
        prefix: tokens that each new response begins with.
    """

    continued: tuple[Completion, ...] = ()
    prefix: tuple[int, ...] = ()


def read_completions(given: Any, *, pad_token_id: int, vocab_size: int) -> tuple[PromptBatch | None, tuple[Start, ...]]:
    """The prompts of completions to be continued, and the completions of each.

    Completions beside each other are samples of one prompt if their prompts and prompt indices are equal and their
    sample indices ascend.

    Args:
        given: a `RolloutBatch` or a sequence of completions.
        pad_token_id: fills the padded batch of prompts that do not come from a `RolloutBatch`.
        vocab_size: token ids must be below it.

    Returns:
        The prompts, those of a `RolloutBatch` padded as they were; None if there are no completions.

    Raises:
        PromptError: something is no completion, or one that cannot be continued.
    """
    completions = given.completions if isinstance(given, RolloutBatch) else given
    if not isinstance(completions, Sequence) or not all(isinstance(entry, Completion) for entry in completions):
        raise PromptError("continue_from must be a RolloutBatch or a list of completions")
    groups: list[list[int]] = []
    for row, completion in enumerate(completions):
        _check(row, completion, vocab_size)
        if groups and _is_next_sample(completions[row - 1], completion):
            groups[-1].append(row)
        else:
            groups.append([row])
    if not groups:
        return None, ()
    first = [rows[0] for rows in groups]
    prompts: Any = [completions[row].prompt_ids for row in first]
    if isinstance(given, RolloutBatch):
        if len(given.completions) != len(given.input_ids):
            raise PromptError(
                f"the batch has {len(given.input_ids)} rows and {len(given.completions)} completions; to continue "
                "some of them, pass those completions"
            )
        end = given.response_start_idx
        prompts = RolloutRequest(given.input_ids[first, :end], given.attention_mask[first, :end])
    batch = read_prompts(prompts, tokenizer=None, pad_token_id=pad_token_id, vocab_size=vocab_size)
    batch = replace(batch, padding_ids=tuple(completions[row].padding_ids for row in first))
    return batch, tuple(Start(continued=tuple(completions[row] for row in rows)) for rows in groups)


def read_prefixes(given: ResponsePrefix | None, prompts: int, tokenizer: Any, vocab_size: int) -> tuple[Start, ...]:
    """The beginning of the responses to each of so many prompts.

    Raises:
        ConfigError: there are more or fewer than prompts.
        PromptError: one is no text and no token ids.
    """
    if given is None:
        return (Start(),) * prompts
    each = isinstance(given, list | tuple) and not all(isinstance(entry, int | np.integer) for entry in given)
    entries: Any = given if each else [given] * prompts
    if len(entries) != prompts:
        raise ConfigError(f"{len(entries)} response prefixes were given for {prompts} prompts; give one, or one each")
    return tuple(Start(prefix=_prefix(index, entry, tokenizer, vocab_size)) for index, entry in enumerate(entries))


def join(batches: Sequence[PromptBatch], pad_token_id: int) -> PromptBatch:
    """One batch of several, padded anew; of one batch, that batch as it is."""
    if len(batches) == 1:
        return batches[0]
    return pad_prompts(
        [prompt for batch in batches for prompt in batch.prompts],
        pad_token_id,
        padding_ids=[ids for batch in batches for ids in batch.padding_ids],
    )


def _is_tuple(value: Any) -> bool:
    return isinstance(value, tuple)


def _is_index(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)


def _is_stream(value: Any) -> bool:
    pair = isinstance(value, tuple) and len(value) == 2
    return pair and all(isinstance(key, int | np.integer) and -(2**31) <= key < 2**31 for key in value)


def _are_flags(values: Any) -> bool:
    return isinstance(values, tuple) and all(value in (0, 1) for value in values)


def _are_told(values: Any) -> bool:
    return values is None or isinstance(values, tuple)


def _are_numbers(values: Any) -> bool:
    # There may be millions, of one type or two.
    return _are_told(values) and all(issubclass(kind, Real) for kind in {*map(type, values or ())})


# Fields of a completion that anybody may have written by hand: whether one holds what it must, and what that is.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("prompt_ids", "token_ids", "padding_ids"), (_is_tuple, "a tuple of token ids")),
    "prompt_index": (_is_index, "a whole number from 0 on"),
    "sample_index": (_is_index, "a whole number from 0 on"),
    "finish_reason": (lambda value: value in get_args(FinishReason), f"one of {', '.join(get_args(FinishReason))}"),
    "sampled_mask": (_are_flags, "zeros and ones"),
    "continued_at": (lambda value: isinstance(value, tuple) and all(map(_is_index, value)), "numbers of tokens"),
    "logprobs": (_are_numbers, "numbers, or None"),
    "raw_logprobs": (_are_numbers, "numbers, or None"),
    "top_logprobs": (_are_told, "pairs for each token, or None"),
    "kept_tokens": (_are_told, "ids or None for each token, or None"),
    "stream": (_is_stream, "two whole numbers of 32 bits"),
}


def _is_next_sample(before: Completion, after: Completion) -> bool:
    same = (before.prompt_index, before.prompt_ids) == (after.prompt_index, after.prompt_ids)
    return same and before.sample_index < after.sample_index


def _check(row: int, completion: Completion, vocab_size: int) -> None:
    if completion.stream is None:
        raise PromptError(
            f"completion {row} was drawn by model.generate, as the fallback, and has no random stream to go on with"
        )
    for name, (holds, what) in _FIELDS.items():
        if not holds(value := getattr(completion, name)):
            raise PromptError(f"{name} of completion {row} must be {what}, not {reprlib.repr(value)}")
    for ids in (completion.token_ids, completion.padding_ids):
        array = read_token_ids(f"completion {row}", ids, "made of token ids")
        _check_vocabulary(f"completion {row}", array, vocab_size)
    count = len(completion.token_ids)
    for name in ("sampled_mask", *BLANKS):
        values = getattr(completion, name)
        if values is not None and len(values) != count:
            raise PromptError(f"completion {row} has {count} tokens and {name} of another length")


def _prefix(index: int, entry: Any, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    name = f"the response prefix of prompt {index}"
    if entry is None:
        return ()
    if isinstance(entry, str):
        if tokenizer is None:
            raise PromptError(f"{name} is text and the engine has no tokenizer; pass one, or token ids")
        entry = tokenizer(entry, add_special_tokens=False)["input_ids"]
    ids = read_token_ids(name, entry, "a string or a list of token ids")
    _check_vocabulary(name, ids, vocab_size)
    return tuple(ids.tolist())


def _check_vocabulary(name: str, ids: np.ndarray, vocab_size: int) -> None:
    strangers = ids[(ids < 0) | (ids >= vocab_size)]
    if len(strangers):
        raise PromptError(f"{name} holds token id {strangers[0]}, outside the vocabulary of {vocab_size}")
