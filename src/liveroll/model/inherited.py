"""What a call takes from the model's generation configuration: of the right kind, or refused by the field's name."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from liveroll.errors import ConfigError
from liveroll.sampling_config import LEAST_PENALTY, LEAST_TEMPERATURE, MOST_PENALTY, MOST_TEMPERATURE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WHOLE = ("max_new_tokens", "min_new_tokens", "max_length", "min_length", "top_k")
_RANGES = {
    "temperature": (LEAST_TEMPERATURE, MOST_TEMPERATURE),
    "top_k": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (LEAST_PENALTY, MOST_PENALTY),
}
_LISTS = ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens")


def check_inherited(model: PreTrainedModel) -> None:
    """Refuse a generation configuration that holds something else than numbers and token ids where these belong.

    transformers checks little of it, so that a mistake would show anywhere.

    Raises:
        ConfigError: naming the field.
    """
    config = model.generation_config
    if not isinstance(config, GenerationConfig):
        raise ConfigError(f"the model's generation_config is {config!r}; set it to a GenerationConfig")
    for name in ("eos_token_id", "pad_token_id"):
        ids = read_ids(value := getattr(config, name))
        if not all(map(_is_whole, ids)) or (name == "pad_token_id" and _is_list(value)):
            raise _wrong(name, value, "a token id" if name == "pad_token_id" else "a token id or a list of them")
    for name in _WHOLE:
        if (value := getattr(config, name, None)) is not None and not _is_whole(value):
            raise _wrong(name, value, "a whole number")
    for name in _RANGES:
        if (value := getattr(config, name, None)) is not None and not _is_number(value):
            raise _wrong(name, value, "a number")
    for name in _LISTS:
        if (value := getattr(config, name, None)) is not None and not _is_list(value):
            raise _wrong(name, value, "a list")


def read_number(config: GenerationConfig, name: str, *, unset: float) -> float:
    """A number that sampling depends on, in the range that float32 allows; `unset` where it is None.

    Raises:
        ConfigError: it is out of range.
    """
    value = getattr(config, name)
    if value is None:
        return unset
    low, high = _RANGES[name]
    if not low <= value <= high:
        bounds = f"at least {low:g}" + ("" if math.isinf(high) else f" and at most {high:g}")
        raise ConfigError(
            f"generation_config.{name} must be {bounds}, not {value!r}: correct it, or give SamplingConfig.{name}"
        )
    return float(value)


def read_ids(value: Any) -> tuple[int, ...]:
    """The token ids in a setting that holds one, several or none, as a number, a sequence or a tensor."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if value is None:
        return ()
    return tuple(value) if _is_list(value) else (value,)


def _is_list(value: Any) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, str) and getattr(value, "ndim", 1) != 0


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _wrong(name: str, value: Any, kind: str) -> ConfigError:
    return ConfigError(f"the model's generation_config.{name} must be {kind}, not {value!r}; correct it")
