"""Settings of transformers that bias or forbid tokens, where they speak of single tokens."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from liveroll.errors import ConfigError, UnsupportedGenerationError
from liveroll.model.switches import INSTEAD

if TYPE_CHECKING:
    from transformers import GenerationConfig

# Penalties and temperatures, at the ends of their ranges, leave what is no larger within the range of float32.
_MOST_BIAS = 1e20


def read_bias(config: GenerationConfig, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Token ids and biases of `sequence_bias`, ascending; those of -inf, which forbid, are left to `read_forbidden`.

    Raises:
        ConfigError: an entry is no token id with a number.
        UnsupportedGenerationError: an entry is of several tokens.
    """
    return tuple(sorted((token, bias) for token, bias in _biases(config, vocab_size).items() if bias > -math.inf))


def read_forbidden(
    config: GenerationConfig, stop_token_ids: tuple[int, ...], vocab_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids that may never be sampled, and those that may not be sampled first, ascending.

    A stop token among `bad_words_ids` is passed over, as transformers does it.

    Raises:
        ConfigError: an entry is no token id.
        UnsupportedGenerationError: an entry of `bad_words_ids` or `sequence_bias` is of several tokens.
    """
    never = {token for token, bias in _biases(config, vocab_size).items() if bias == -math.inf}
    never |= {*_ids(config, "suppress_tokens", vocab_size)}
    words = [_single(config, "bad_words_ids", word, vocab_size) for word in config.bad_words_ids or ()]
    never |= {*words} - {*stop_token_ids}
    return tuple(sorted(never)), tuple(sorted({*_ids(config, "begin_suppress_tokens", vocab_size)}))


def _biases(config: GenerationConfig, vocab_size: int) -> dict[int, float]:
    """`sequence_bias`, a dictionary by tuples of tokens or a list of pairs, by token."""
    given = config.sequence_bias or {}
    pairs = given.items() if isinstance(given, dict) else given
    try:
        entries = [(tokens, float(bias)) for tokens, bias in pairs]
    except (TypeError, ValueError):
        raise _malformed(config, "sequence_bias", "must map lists of token ids to numbers") from None
    if not all(bias == -math.inf or abs(bias) <= _MOST_BIAS for _, bias in entries):
        raise _malformed(config, "sequence_bias", f"must hold -inf or numbers within {_MOST_BIAS:g} of 0, not NaN")
    return {_single(config, "sequence_bias", tokens, vocab_size): bias for tokens, bias in entries}


def _single(config: GenerationConfig, name: str, tokens: Any, vocab_size: int) -> int:
    if isinstance(tokens, Iterable) and len(entry := list(tokens)) != 1:
        raise UnsupportedGenerationError(
            f"generation_config.{name}={reprlib.repr(getattr(config, name))} holds {entry}, and the engine biases and "
            f"forbids single tokens only: unset it, {INSTEAD}"
        )
    return _checked(config, name, entry if isinstance(tokens, Iterable) else [tokens], vocab_size)[0]


def _ids(config: GenerationConfig, name: str, vocab_size: int) -> list[int]:
    given = getattr(config, name)
    return _checked(config, name, [] if given is None else list(given), vocab_size)


def _checked(config: GenerationConfig, name: str, tokens: list[Any], vocab_size: int) -> list[int]:
    plain: list[Any] = [token.item() if isinstance(token, torch.Tensor) else token for token in tokens]
    if not all(isinstance(token, int) and 0 <= token < vocab_size for token in plain):
        raise _malformed(config, name, f"must hold token ids of this model, 0 to {vocab_size - 1}")
    return plain


def _malformed(config: GenerationConfig, name: str, what: str) -> ConfigError:
    return ConfigError(f"generation_config.{name}={reprlib.repr(getattr(config, name))} {what}")
