"""Prompts in any accepted form, as validated token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from liveroll.errors import ConfigError, PromptError
from liveroll.model.inherited import read_ids
from liveroll.types import RolloutRequest

Prompts = RolloutRequest | Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[dict[str, Any]]]


@dataclass(frozen=True)
class PromptBatch:
    """Validated prompts, and the left-padded batch that they make.

    Attributes:
        prompts: int64 token ids `[P_i]` of each.
        padding_ids: for each prompt, the token ids that stood at masked positions of a given batch.
        input_ids: `[B, P]` int64 on the CPU.
        attention_mask: `[B, P]` int64 on the CPU.
    """

    prompts: tuple[np.ndarray, ...]
    padding_ids: tuple[tuple[int, ...], ...]
    input_ids: Tensor
    attention_mask: Tensor

    @cached_property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        """The prompts as tuples, which completions share."""
        return tuple(tuple(prompt.tolist()) for prompt in self.prompts)

    @property
    def width(self) -> int:
        """Tokens of the longest row of the padded batch."""
        return self.input_ids.shape[1]


def check_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer given to an engine, or None.

    Raises:
        ConfigError: it is something else.
    """
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise ConfigError(f"tokenizer must be a transformers tokenizer, not a {type(tokenizer).__name__}")
    return tokenizer


def padding_token(model: PreTrainedModel, tokenizer: Any) -> int:
    """The token that fills padded batches: the model's PAD or EOS, the tokenizer's PAD or EOS, else 0.

    Raises:
        PromptError: there is a tokenizer and none of the four is set.
    """
    own = model.generation_config
    candidates: list[Any] = [*read_ids(own.pad_token_id), *read_ids(own.eos_token_id)[:1]]
    candidates += [getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id")]
    for candidate in candidates:
        if candidate is not None:
            return int(candidate)
    if tokenizer is not None:
        raise PromptError("neither the tokenizer nor the model has a pad or eos token; set tokenizer.pad_token")
    return 0


def read_prompts(prompts: Prompts | None, *, tokenizer: Any, pad_token_id: int, vocab_size: int) -> PromptBatch:
    """Turn prompts into token ids.

    Args:
        prompts: token-id lists, strings, chat message lists, or a left-padded `RolloutRequest`.
        tokenizer: needed for strings and messages.
        pad_token_id: fills the padded batch of prompts that were not given as one.
        vocab_size: token ids must be below it.

    Raises:
        PromptError: naming the prompt and what is wrong with it.
    """
    if isinstance(prompts, RolloutRequest):
        batch = _read_request(prompts)
    else:
        batch = pad_prompts(_tokenize(prompts, tokenizer), pad_token_id)
    for index, prompt in enumerate(batch.prompts):
        if not len(prompt):
            raise PromptError(f"prompt {index} is empty; every prompt needs at least one token")
    given = np.concatenate([*batch.prompts, *(np.array(ids, np.int64) for ids in batch.padding_ids if ids)])
    if given.min() < 0 or given.max() >= vocab_size:
        raise PromptError(_describe_stranger(batch, vocab_size))
    return batch


def is_empty(prompts: Prompts | None) -> bool:
    """Whether there are no prompts, in a form in which there might be some."""
    if isinstance(prompts, RolloutRequest):
        return isinstance(prompts.prompt_ids, Tensor) and len(prompts.prompt_ids) == 0
    return prompts is None or (isinstance(prompts, Sequence) and not isinstance(prompts, str) and not prompts)


def _describe_stranger(batch: PromptBatch, vocab_size: int) -> str:
    """Where the first token id outside the vocabulary stands."""
    for index, (prompt, padding) in enumerate(zip(batch.prompts, batch.padding_ids, strict=True)):
        for ids, holds in ((prompt.tolist(), "holds"), (padding, "is padded with")):
            for token in ids:
                if not 0 <= token < vocab_size:
                    return f"prompt {index} {holds} token id {token}, outside the vocabulary of {vocab_size}"
    raise ValueError("every token id is in the vocabulary")


def _tokenize(prompts: Any, tokenizer: Any) -> list[np.ndarray]:
    if isinstance(prompts, str | bytes | dict) or not isinstance(prompts, Sequence):
        raise PromptError(
            f"prompts must be a list of prompts or a RolloutRequest, not a {type(prompts).__name__}; give a single "
            "prompt as a list of one, and a padded batch as "
            "RolloutRequest(prompt_ids=input_ids, prompt_attention_mask=attention_mask)"
        )
    if not prompts:
        raise PromptError("the list of prompts is empty")
    return [_tokenize_one(index, prompt, tokenizer) for index, prompt in enumerate(prompts)]


def _tokenize_one(index: int, prompt: Any, tokenizer: Any) -> np.ndarray:
    is_chat = isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(entry, dict) for entry in prompt)
    if is_chat or isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError(f"prompt {index} is text and the engine has no tokenizer; pass one, or token ids")
        try:
            ids = _read_chat(prompt, tokenizer) if is_chat else tokenizer(prompt)["input_ids"]
        except Exception as error:  # a chat template is a program, and may fail in any way
            raise PromptError(f"the tokenizer refuses prompt {index}: {error}") from error
    else:
        ids = prompt
    return read_token_ids(f"prompt {index}", ids, "a string, a list of token ids or a list of chat messages")


def read_token_ids(name: str, value: Any, expected: str) -> np.ndarray:
    """Token ids as an int64 array.

    Args:
        name: what they are, for the error.
        value: a sequence of whole numbers, an array or a tensor.
        expected: what else would have been right, for the error.

    Raises:
        PromptError: the value is something else, or an id does not fit 64 bits.
    """
    ids = value.tolist() if isinstance(value, Tensor | np.ndarray) else value
    if not isinstance(ids, Sequence) or isinstance(ids, bytes | str) or not all(map(_is_whole, {*map(type, ids)})):
        raise PromptError(f"{name} must be {expected}, not {_short(value)}")
    try:
        return np.array(ids, np.int64)
    except OverflowError:
        raise PromptError(f"{name} holds a token id that does not fit 64 bits") from None


def _read_chat(messages: Any, tokenizer: Any) -> Any:
    for message in messages:
        if not isinstance(message.get("role"), str) or not {"content", "tool_calls"} & set(message):
            raise ValueError(f"the message {_short(message)} needs a role and a content")
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return rendered["input_ids"]


def _is_whole(kind: type) -> bool:
    return kind is int or (kind is not bool and issubclass(kind, int | np.integer))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def pad_prompts(
    prompts: Sequence[np.ndarray], pad_token_id: int, padding_ids: Sequence[tuple[int, ...]] | None = None
) -> PromptBatch:
    """Prompts left-padded to the longest; `padding_ids` where they stood at masked positions of another batch."""
    width = max(map(len, prompts), default=0)
    ids = np.full((len(prompts), width), pad_token_id, np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        start = width - len(prompt)
        ids[row, start:], mask[row, start:] = prompt, 1
    stood = ((),) * len(prompts) if padding_ids is None else tuple(padding_ids)
    return PromptBatch(tuple(prompts), stood, torch.from_numpy(ids), torch.from_numpy(mask))


def _read_request(request: RolloutRequest) -> PromptBatch:
    ids, mask = request.prompt_ids, request.prompt_attention_mask
    if not isinstance(ids, Tensor) or not isinstance(mask, Tensor):
        raise PromptError("prompt_ids and prompt_attention_mask must be tensors")
    if ids.dim() != 2 or ids.shape != mask.shape:
        raise PromptError(
            f"prompt_ids {tuple(ids.shape)} and prompt_attention_mask {tuple(mask.shape)} must both be [B, T]"
        )
    if ids.device != mask.device:
        raise PromptError(f"prompt_ids are on {ids.device} and prompt_attention_mask on {mask.device}")
    if ids.is_meta:
        raise PromptError("prompt_ids are on the meta device and hold no values")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise PromptError(f"prompt_ids must be integers, not {ids.dtype}")
    if ids.numel() == 0:
        raise PromptError(f"prompt_ids {tuple(ids.shape)} hold no prompt")
    # One transfer for everything; a mask is nonzero or not, whatever its dtype can count to.
    both = torch.stack([ids.long(), mask.ne(0).long(), mask.ne(mask).long()]).cpu()
    grid, ones, undefined = both.numpy()
    if undefined.any():
        raise PromptError(f"prompt_attention_mask of row {np.argwhere(undefined)[0, 0]} holds NaN")
    steps = np.diff(ones, axis=1)
    crooked = np.flatnonzero((steps < 0).any(axis=1))
    if len(crooked):
        raise PromptError(
            f"prompt_attention_mask of row {crooked[0]} has a zero behind a one; "
            "prompts must be left-padded, without holes"
        )
    starts = ones.shape[1] - ones.sum(axis=1)
    prompts = tuple(row[start:].copy() for row, start in zip(grid, starts.tolist(), strict=True))
    padding = tuple(tuple(np.unique(row[:start]).tolist()) for row, start in zip(grid, starts.tolist(), strict=True))
    return PromptBatch(prompts, padding, both[0], both[1])
