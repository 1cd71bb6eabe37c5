"""What a trainer of TRL says about generation: its settings for the engine, and its prompts as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from liveroll.errors import ConfigError, PromptError
from liveroll.sampling_config import SamplingConfig

_SAME = ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_RENAMED = {"eos_token_id": "stop_token_ids", "stop_strings": "stop", "suppress_tokens": "forbidden_tokens"}
# What is sampled does not depend on these.
_WITHOUT_EFFECT = ("do_sample", "pad_token_id", "bos_token_id")

_REFUSED = {
    "use_vllm": "hands generation to vLLM",
    "use_transformers_continuous_batching": "hands generation to transformers' continuous batching",
    "use_transformers_paged": "hands generation to transformers' continuous batching",
    "cache_implementation": "chooses a cache of model.generate, and the engine has its own",
}


def check_arguments(args: Any) -> None:
    """Refuse arguments of a trainer that put something else in the engine's place.

    Args:
        args: a `GRPOConfig` or `RLOOConfig`.

    Raises:
        ConfigError: naming the argument.
    """
    for name, what in _REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(f"{type(args).__name__}.{name} {what}; leave it out where liveroll generates")


def read_settings(trainer: Any) -> SamplingConfig:
    """The settings that the trainer's own `model.generate` would be given, its `generation_kwargs` included.

    Raises:
        ConfigError: the engine does not do one of them.
    """
    given: Mapping[str, Any] = trainer.generation_kwargs
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or name in _WITHOUT_EFFECT or (name == "num_return_sequences" and value == 1):
            continue
        if name in _SAME:
            settings[name] = value
        elif name in _RENAMED:
            settings[_RENAMED[name]] = value if isinstance(value, str) else _without_none(value)
        else:
            raise ConfigError(
                f"{type(trainer.args).__name__}.generation_kwargs holds {name}={value!r}, which the engine does not "
                f"do; it takes {', '.join((*_SAME, *_RENAMED, 'do_sample'))}"
            )
    if given.get("do_sample") is False:
        settings["temperature"] = 0.0
    return SamplingConfig(**settings)


def _without_none(value: Any) -> tuple[Any, ...]:
    return tuple(item for item in (value if isinstance(value, list | tuple) else [value]) if item is not None)


def tokenize_prompts(prompts: Any, trainer: Any) -> list[list[int]]:
    """Prompts of a data set as token ids, with the trainer's tokenizer and chat template.

    Args:
        prompts: strings, or conversations (lists of messages).
        trainer: the trainer.

    Raises:
        PromptError: a prompt is neither, or holds more than text.
    """
    if not isinstance(prompts, list) or not prompts:
        raise PromptError(f"prompts must be a list of strings or of conversations, not {prompts!r:.60}")
    if all(isinstance(prompt, str) for prompt in prompts):
        return _as_lists(trainer.processing_class(text=prompts)["input_ids"])
    for index, prompt in enumerate(prompts):
        _check_conversation(index, prompt)
    rendered = trainer.processing_class.apply_chat_template(
        conversation=prompts,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return _as_lists(rendered["input_ids"])


def _check_conversation(index: int, prompt: Any) -> None:
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        raise PromptError(
            f"prompt {index} is {prompt!r:.60}; prompts must all be strings, or all lists of messages with a role and "
            "a content"
        )
    for message in prompt:
        if not isinstance(message, Mapping) or "role" not in message:
            raise PromptError(f"prompt {index} holds {message!r:.60}, which is no message with a role and a content")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if any(part.get("type", "text") != "text" for part in parts):
            raise PromptError(f"prompt {index} holds more than text, and the engine takes text alone")


def _as_lists(rows: Any) -> list[list[int]]:
    return [list(map(int, row)) for row in rows]
