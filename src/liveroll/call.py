"""One call of `generate`: its prompts, its resolved settings and its requests, all checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from liveroll.completion import Completion
from liveroll.config import RolloutConfig
from liveroll.errors import ConfigError, PrefillLimitError, PromptError
from liveroll.model.versions import PENALTY_COUNTS_PADDING
from liveroll.prompts import PromptBatch
from liveroll.sampling_config import SamplingConfig
from liveroll.scheduling.request import Request
from liveroll.scheduling.scheduler import StopSearch
from liveroll.starts import Start
from liveroll.stopping import StopStrings
from liveroll.streams import assign_streams
from liveroll.types import ResolvedSampling


@dataclass(frozen=True)
class Call:
    """A validated call.

    Attributes:
        prompts: the prompts.
        sampling: resolved settings of each prompt.
        requests: one for each sample of each prompt, in the order of the result; those that have nothing left to do
            are finished.
        stop_strings: finds stop strings; None where no prompt has any.
        sampled_size: ids below this may be sampled; None where the call was handed on.
    """

    prompts: PromptBatch
    sampling: tuple[ResolvedSampling, ...]
    requests: tuple[Request, ...]
    stop_strings: StopStrings | None
    sampled_size: int | None = None

    @property
    def search_stop(self) -> StopSearch | None:
        """The search for stop strings; None where no prompt has any."""
        return None if self.stop_strings is None else self.stop_strings.search

    @property
    def settings(self) -> tuple[ResolvedSampling, ...]:
        """The settings of all prompts without those that are one object with others."""
        return tuple({id(settings): settings for settings in self.sampling}.values())

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """The requests that have not ended."""
        return tuple(request for request in self.requests if request.finish_reason is None)


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


def check_room(index: int, length: int, budget: int, limit: int | None, name: str, *, forced: int = 0) -> None:
    """Refuse a prompt that is longer, together with its budget, than a limit of that name, if there is one.

    Raises:
        PromptError: with the numbers.
    """
    total = length + forced + budget
    if limit is not None and total > limit:
        has = f"{length} tokens" + (f" and {forced} forced ones behind it" if forced else "")
        raise PromptError(
            f"prompt {index} has {has} and max_new_tokens is {budget}, together {total}, and "
            f"{name} is {limit}; shorten the prompt or lower max_new_tokens"
        )


def make_call(
    prompts: PromptBatch,
    sampling: tuple[ResolvedSampling, ...],
    starts: Sequence[Start],
    *,
    config: RolloutConfig,
    max_tokens: int | None,
    max_positions: int | None,
    seed: int,
    tokenizer: Any,
    sampled_size: int | None = None,
) -> Call:
    """Lay out the requests and check their lengths.

    Args:
        prompts: the prompts.
        sampling: resolved settings of each.
        starts: what is given of each one's responses.
        config: the engine's.
        max_tokens: tokens in one prefill forward: `prefill_max_tokens`, or less where the costs allow less.
        max_positions: longest sequence the model allows, or None.
        seed: for prompts whose settings give none.
        tokenizer: needed where there are stop strings.
        sampled_size: ids below this may be sampled; all of them if None.

    Raises:
        ConfigError: log-probabilities are asked for, and a completion to be continued has none.
        PrefillLimitError: a prompt and the prefix of its response are longer than `max_tokens`.
        PromptError: a row is longer than the model or `max_length` allow.
    """
    for index, (prompt, start) in enumerate(zip(prompts.prompts, starts, strict=True)):
        length = len(prompt) + len(start.prefix)
        if max_tokens is not None and length > max_tokens:
            name = "prefill_max_tokens" if max_tokens == config.prefill_max_tokens else "max_tokens of its costs"
            raise PrefillLimitError(
                f"prompt {index} has {length} tokens and {name} is {max_tokens}; "
                "shorten it, or raise the limit (None removes it)"
            )
    requests = _lay_out(prompts, sampling, starts, seed)
    for request in requests:
        # New samples of a prompt are as long as the first of them.
        if request.finish_reason is None and (request.before is not None or not request.sample_index):
            index, budget = request.prompt_index, request.sampling.max_new_tokens
            length = len(prompts.prompts[index])
            forced = request.longest + 1 - length - budget
            check_room(index, length, budget, max_positions, "the model's max_position_embeddings", forced=forced)
            check_room(index, length, budget, config.max_length, "RolloutConfig.max_length", forced=forced)
    watched = any(settings.stop for settings in sampling)
    return Call(prompts, sampling, requests, StopStrings(tokenizer) if watched else None, sampled_size)


def _lay_out(
    prompts: PromptBatch, sampling: Sequence[ResolvedSampling], starts: Sequence[Start], seed: int
) -> tuple[Request, ...]:
    seeds = [seed if settings.seed is None else settings.seed for settings in sampling]
    counts = [0 if start.continued else settings.n for start, settings in zip(starts, sampling, strict=True)]
    streams = assign_streams(prompts.prompts, counts, seeds)
    groups: dict[bytes, int] = {}
    requests: list[Request] = []
    for index, start in enumerate(starts):
        prompt, prefix = prompts.prompts[index], np.array(start.prefix, np.int64)
        new = [_Begun(sample, stream, prefix) for sample, stream in enumerate(streams[index])]
        for begun in (*map(_Begun.of, start.continued), *new):
            root = np.concatenate([prompt, begun.prefix]) if len(begun.prefix) else prompt
            request = Request(
                row=len(requests),
                prompt_index=index,
                sample_index=begun.sample_index,
                group=groups.setdefault(root.tobytes(), len(groups)),
                prompt=root,
                prefix=begun.prefix,
                padding_ids=prompts.padding_ids[index] if PENALTY_COUNTS_PADDING else (),
                sampling=sampling[index],
                stream=begun.stream,
                given_mask=begun.mask,
                before=begun.completion,
                tokens=begun.tokens,
                logprobs=np.zeros(len(begun.tokens), np.float32),
            )
            if begun.completion is not None:
                _take_up(request, begun.completion)
            requests.append(request)
    return tuple(requests)


class _Begun(NamedTuple):
    """A response as a call finds it: the forced tokens that it begins with, and those behind them."""

    sample_index: int
    stream: tuple[int, int]
    prefix: np.ndarray
    tokens: np.ndarray = np.empty(0, np.int64)
    mask: np.ndarray = np.empty(0, np.uint8)
    completion: Completion | None = None

    @classmethod
    def of(cls, completion: Completion) -> _Begun:
        """As a completion leaves it; one without a random stream was refused before."""
        tokens = np.array(completion.token_ids, np.int64)
        mask = np.array(completion.sampled_mask, np.uint8)
        forced = int(mask.argmax()) if mask.any() else len(mask)
        stream = completion.stream or (0, 0)
        return cls(completion.sample_index, stream, tokens[:forced], tokens[forced:], mask[forced:], completion)


def _take_up(request: Request, before: Completion) -> None:
    """Finish a request that has nothing left to do, and check that the completion tells what is to be told.

    Raises:
        ConfigError: something is asked for of each token that the completion does not tell of its own.
    """
    if before.finish_reason == "stop":
        request.finish_reason, request.stop = "stop", before.stop
    elif request.left <= 0:
        request.finish_reason = "length"
    elif before.token_ids:
        for name in request.sampling.told:
            if getattr(before, name) is None:
                raise ConfigError(
                    f"sample {before.sample_index} of prompt {request.prompt_index} is to be continued with {name} and "
                    f"has none for its tokens so far; leave SamplingConfig.{name} off"
                )
