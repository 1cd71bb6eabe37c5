"""One call of `generate`: its prompts, its resolved settings and its requests, all checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from liveroll.config import RolloutConfig
from liveroll.errors import ConfigError, PrefillLimitError, PromptError
from liveroll.model.versions import PENALTY_COUNTS_PADDING
from liveroll.prompts import PromptBatch
from liveroll.sampling_config import SamplingConfig
from liveroll.scheduling.request import Request
from liveroll.stopping import StopStrings
from liveroll.streams import assign_streams
from liveroll.types import ResolvedSampling


@dataclass(frozen=True)
class Call:
    """A validated call.

    Attributes:
        prompts: the prompts.
        sampling: resolved settings of each prompt.
        requests: one for each sample of each prompt, in the order of the result.
        stop_strings: finds stop strings; None where no prompt has any.
        sampled_size: ids below this may be sampled; None where the call was handed on.
    """

    prompts: PromptBatch
    sampling: tuple[ResolvedSampling, ...]
    requests: tuple[Request, ...]
    stop_strings: StopStrings | None
    sampled_size: int | None = None


def spread_sampling(sampling: SamplingConfig | Sequence[SamplingConfig], prompts: int) -> list[SamplingConfig]:
    """One `SamplingConfig` a prompt.

    Raises:
        ConfigError: a list of another length, or of something else.
    """
    if isinstance(sampling, SamplingConfig):
        return [sampling] * prompts
    if not isinstance(sampling, Sequence):
        raise ConfigError(f"sampling must be a SamplingConfig or a list of them, not a {type(sampling).__name__}")
    given = list(sampling)
    if len(given) != prompts:
        raise ConfigError(f"{len(given)} SamplingConfigs were given for {prompts} prompts; give one, or one each")
    for entry in given:
        if not isinstance(entry, SamplingConfig):
            raise ConfigError(f"sampling holds a {type(entry).__name__}; every entry must be a SamplingConfig")
    return given


def check_room(index: int, length: int, budget: int, limit: int | None, name: str) -> None:
    """Refuse a prompt that is longer, together with its budget, than a limit of that name, if there is one.

    Raises:
        PromptError: with the numbers.
    """
    if limit is not None and length + budget > limit:
        raise PromptError(
            f"prompt {index} has {length} tokens and max_new_tokens is {budget}, together {length + budget}, and "
            f"{name} is {limit}; shorten the prompt or lower max_new_tokens"
        )


def make_call(
    prompts: PromptBatch,
    sampling: tuple[ResolvedSampling, ...],
    *,
    config: RolloutConfig,
    max_tokens: int | None,
    max_positions: int | None,
    seed: int,
    tokenizer: Any,
    sampled_size: int | None = None,
) -> Call:
    """Check lengths and lay out the requests.

    Args:
        prompts: the prompts.
        sampling: resolved settings of each.
        config: the engine's.
        max_tokens: tokens in one prefill forward: `prefill_max_tokens`, or less where the costs allow less.
        max_positions: longest sequence the model allows, or None.
        seed: for prompts whose settings give none.
        tokenizer: needed where there are stop strings.
        sampled_size: ids below this may be sampled; all of them if None.

    Raises:
        PrefillLimitError: a prompt is longer than `max_tokens`.
        PromptError: a prompt and its budget are longer than the model or `max_length` allow.
    """
    for index, (prompt, settings) in enumerate(zip(prompts.prompts, sampling, strict=True)):
        length = len(prompt)
        if max_tokens is not None and length > max_tokens:
            name = "prefill_max_tokens" if max_tokens == config.prefill_max_tokens else "max_tokens of its costs"
            raise PrefillLimitError(
                f"prompt {index} has {length} tokens and {name} is {max_tokens}; "
                "shorten it, or raise the limit (None removes it)"
            )
        check_room(index, length, settings.max_new_tokens, max_positions, "the model's max_position_embeddings")
        check_room(index, length, settings.max_new_tokens, config.max_length, "RolloutConfig.max_length")
    seeds = [seed if settings.seed is None else settings.seed for settings in sampling]
    streams = assign_streams(prompts.prompts, [settings.n for settings in sampling], seeds)
    first: dict[bytes, int] = {}
    requests: list[Request] = []
    for index, keys in enumerate(streams):
        group = first.setdefault(prompts.prompts[index].tobytes(), index)
        for sample, stream in enumerate(keys):
            requests.append(
                Request(
                    row=len(requests),
                    prompt_index=index,
                    sample_index=sample,
                    group=group,
                    prompt=prompts.prompts[index],
                    padding_ids=prompts.padding_ids[index] if PENALTY_COUNTS_PADDING else (),
                    sampling=sampling[index],
                    stream=stream,
                )
            )
    watched = any(settings.stop for settings in sampling)
    return Call(prompts, sampling, tuple(requests), StopStrings(tokenizer) if watched else None, sampled_size)
