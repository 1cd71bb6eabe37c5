"""What ranks must have in common to generate together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from hashlib import blake2b
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import liveroll
from liveroll.config import RolloutConfig
from liveroll.sampling_config import SamplingConfig
from liveroll.vocabulary import Vocabulary

_AGREED = (
    "seed",
    "balance",
    "max_length",
    "prefill_max_tokens",
    "training_mode",
    "sample_padded_vocabulary",
    "fallback",
)
"""Fields of `RolloutConfig` on which it depends what a call returns, or whether it is refused."""

_NOT_COMPARED = ("_name_or_path", "transformers_version")
"""Entries of configurations that say where a model came from, and not what it is."""


def engine_subjects(
    model: PreTrainedModel, config: RolloutConfig, vocabulary: Vocabulary, tokenizer: Any
) -> dict[str, str]:
    """What the engines of all ranks must have in common, by name. The values of weights are not looked at."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    count = sum(tensor.numel() for _, tensor in tensors)
    versions = (liveroll.__version__, torch.__version__, transformers.__version__)
    return {
        "the versions": " ".join(f"{name} {version}" for name, version in zip(_PACKAGES, versions, strict=True)),
        "the model": f"a {type(model).__name__} of {count} numbers in {len(tensors)} tensors ({_digest(shapes)})",
        "the model's configuration": _digest(_compared(model.config.to_dict())),
        "the model's generation configuration": _digest(_compared(model.generation_config.to_dict())),
        "the tokenizer": f"{type(tokenizer).__name__}, {vocabulary.sampled_size} ids that may be sampled",
        **{f"RolloutConfig.{name}": repr(getattr(config, name)) for name in _AGREED},
    }


def sampling_subjects(sampling: SamplingConfig | None) -> dict[str, str]:
    """What ranks must have in common that give one `SamplingConfig` for all of their prompts."""
    settings = SamplingConfig() if sampling is None else sampling
    return {f"SamplingConfig.{field.name}": repr(getattr(settings, field.name)) for field in fields(settings)}


_PACKAGES = ("liveroll", "torch", "transformers")


def _compared(configuration: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in configuration.items() if name not in _NOT_COMPARED}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=4).hexdigest()
