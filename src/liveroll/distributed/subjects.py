"""What ranks must have in common to generate together."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import fields
from hashlib import blake2b
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

import liveroll
from liveroll.config import RolloutConfig
from liveroll.intake import Given
from liveroll.planning.costs import CostModel
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

_UNLIKE = ("kv_tokens", "kv_bytes", "kv_fraction", "costs", "balance", "rank_timeout", "progress", "profile")
"""Fields of `RolloutConfig` that may differ between ranks which compute layers together.

They take the least of the KV memory that each may take. Costs are compared as they were read.
"""

_NOT_COMPARED = ("_name_or_path", "transformers_version")
"""Entries of configurations that say where a model came from, and not what it is."""


def engine_subjects(
    model: PreTrainedModel, config: RolloutConfig, vocabulary: Vocabulary, tokenizer: Any
) -> dict[str, str]:
    """What the engines of all ranks must have in common, by name. The values of weights are not looked at."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    count = sum(tensor.numel() for _, tensor in tensors)
    dtypes = " and ".join(sorted({dtype.removeprefix("torch.") for _, _, dtype in shapes}))
    versions = (liveroll.__version__, torch.__version__, transformers.__version__)
    return {
        "the versions": " ".join(f"{name} {version}" for name, version in zip(_PACKAGES, versions, strict=True)),
        "the model": (
            f"a {type(model).__name__} of {count} numbers in {len(tensors)} tensors of {dtypes} ({_digest(shapes)})"
        ),
        "the model's configuration": _digest(_compared(model.config.to_dict())),
        "the model's generation configuration": _described(model.generation_config),
        "the tokenizer": f"{type(tokenizer).__name__}, {vocabulary.sampled_size} ids that may be sampled",
        **{f"RolloutConfig.{name}": repr(getattr(config, name)) for name in _AGREED},
    }


def sampling_subjects(sampling: SamplingConfig | None) -> dict[str, str]:
    """What ranks must have in common that give one `SamplingConfig` for all of their prompts."""
    settings = SamplingConfig() if sampling is None else sampling
    return {f"SamplingConfig.{field.name}": repr(getattr(settings, field.name)) for field in fields(settings)}


def call_subjects(model: PreTrainedModel, config: RolloutConfig, costs: CostModel, given: Given) -> dict[str, str]:
    """What ranks that compute layers together must have in common in a call, by name."""
    batch, settings = given.prompts, given.sampling
    one = set(settings)
    ids = b"".join(prompt.tobytes() for prompt in batch.prompts)
    layout = [list(map(len, batch.prompts)), batch.padding_ids, batch.width]
    continued = [
        [(c.prompt_ids, c.token_ids, c.stream, c.sample_index, c.finish_reason) for c in start.continued]
        for start in given.starts
    ]
    return {
        **{
            f"RolloutConfig.{field.name}": repr(getattr(config, field.name))
            for field in fields(config)
            if field.name not in _UNLIKE
        },
        "the costs": repr(costs),
        "the model's configuration": _digest(_compared(model.config.to_dict())),
        "the model's generation configuration": _described(model.generation_config),
        "the prompts": f"{len(batch.prompts)} of {len(ids) // 8} tokens ({_digest([_digest_bytes(ids), layout])})",
        **(sampling_subjects(settings[0]) if len(one) == 1 else {}),
        "the settings of each prompt": _digest([repr(entry) for entry in settings]),
        "the completions to continue": _digest(continued),
        "the prefixes of responses": _digest([start.prefix for start in given.starts]),
    }


_PACKAGES = ("liveroll", "torch", "transformers")


def _compared(configuration: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in configuration.items() if name not in _NOT_COMPARED}


def _described(configuration: GenerationConfig) -> str:
    """What a configuration sets, long values cut short, before a digest of all that it says."""
    entries, default = (_compared(one.to_dict()) for one in (configuration, GenerationConfig()))
    # Values are compared by their text: the truth of a tensor's comparison is none.
    told = [f"{name}={reprlib.repr(value)}" for name, value in sorted(entries.items()) if value is not None]
    known = {f"{name}={reprlib.repr(value)}" for name, value in default.items()}
    return f"{', '.join(entry for entry in told if entry not in known) or 'nothing set'} ({_digest(entries)})"


def _digest(value: Any) -> str:
    return _digest_bytes(json.dumps(value, sort_keys=True, default=str).encode())


def _digest_bytes(value: bytes) -> str:
    return blake2b(value, digest_size=4).hexdigest()
