"""Prompts and settings on their way in: read, resolved, and checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from liveroll.call import Call, make_call, spread_sampling
from liveroll.config import RolloutConfig
from liveroll.errors import ConfigError, PromptError
from liveroll.model.inherited import check_inherited
from liveroll.model.resolver import SettingsResolver
from liveroll.prompts import PromptBatch, Prompts, is_empty, padding_token, read_prompts
from liveroll.sampling_config import SamplingConfig
from liveroll.starts import ContinueFrom, ResponsePrefix, Start, join, read_completions, read_prefixes
from liveroll.streams import call_seed
from liveroll.vocabulary import Vocabulary

Sampling = SamplingConfig | Sequence[SamplingConfig]


@dataclass(frozen=True)
class Inputs:
    """What a caller asks for, as it was given and not read yet; all as for `RolloutEngine.generate`."""

    prompts: Prompts | None
    sampling: Sampling | None
    continue_from: ContinueFrom | None = None
    response_prefix: ResponsePrefix | None = None
    max_seconds: float | None = None
    max_total_tokens: int | None = None


@dataclass(frozen=True)
class Given:
    """What a call was given, read and not resolved yet.

    Attributes:
        prompts: the prompts, those of completions to be continued first.
        sampling: the settings of each.
        starts: what there is of each one's responses.
    """

    prompts: PromptBatch
    sampling: tuple[SamplingConfig, ...]
    starts: tuple[Start, ...]

    @property
    def all_new(self) -> bool:
        """Whether nothing is there of any response."""
        return not any(start.continued or start.prefix for start in self.starts)


def join_given(parts: Sequence[Given], pad_token_id: int) -> Given:
    """What several were given as if one had been given all of it, in this order."""
    return Given(
        join([part.prompts for part in parts if part.prompts.prompts], pad_token_id),
        tuple(settings for part in parts for settings in part.sampling),
        tuple(start for part in parts for start in part.starts),
    )


class Intake:
    """Makes calls of what an engine is given.

    Args:
        model: the model.
        tokenizer: for prompts and stop strings given as text, or None.
        config: the engine's.
        max_tokens: tokens in one prefill forward, or None.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, config: RolloutConfig, max_tokens: int | None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._config = config
        self._max_tokens = max_tokens
        self._resolver = SettingsResolver(model)
        self.vocabulary = Vocabulary(model, tokenizer, padded=config.sample_padded_vocabulary)
        self.calls = 0
        """Calls made so far, which the seeds of the next ones depend on."""

    @property
    def padding_token(self) -> int:
        """Fills padded batches."""
        return padding_token(self._model, self._tokenizer)

    def read(self, inputs: Inputs, *, may_be_empty: bool = False) -> Given:
        """Token ids of the prompts, the settings of each, and what there is of their responses.

        Unless it `may_be_empty`, there must be some.
        """
        check_inherited(self._model)
        pad, vocab_size = self.padding_token, self.vocabulary.size
        batches: list[PromptBatch] = []
        starts: tuple[Start, ...] = ()
        if inputs.continue_from is not None:
            continued, starts = read_completions(inputs.continue_from, pad_token_id=pad, vocab_size=vocab_size)
            batches += [] if continued is None else [continued]
        prompts = None if may_be_empty and is_empty(inputs.prompts) else inputs.prompts
        if prompts is None and not (batches or may_be_empty):
            raise PromptError("there is nothing to generate; give prompts, or completions in continue_from")
        new = 0
        if prompts is not None:
            batches.append(read_prompts(prompts, tokenizer=self._tokenizer, pad_token_id=pad, vocab_size=vocab_size))
            new = len(batches[-1].prompts)
        elif inputs.response_prefix is not None and inputs.prompts is None and inputs.continue_from is not None:
            raise ConfigError("response_prefix begins responses to new prompts; a completion is extended by its extend")
        starts += read_prefixes(inputs.response_prefix, new, self._tokenizer, vocab_size)
        batch = join(batches, pad)
        sampling = SamplingConfig() if inputs.sampling is None else inputs.sampling
        return Given(batch, tuple(spread_sampling(sampling, len(batch.prompts))), starts)

    def open(self, given: Given, before: int | None = None) -> Call:
        """A call with resolved settings, its lengths checked. A call that is refused uses no seed up.

        Args:
            given: what it was given.
            before: calls that count as made before it, if not those of this engine.
        """
        if before is not None:
            self.calls = before
        call = self.draft(given)
        self.calls += 1
        return call

    def draft(self, given: Given) -> Call:
        """The call that `open` would make. It uses no seed up, so it is not to be run."""
        resolved = self._resolver.resolve(given.sampling, given.prompts, self.padding_token)
        call = make_call(
            given.prompts,
            resolved,
            given.starts,
            config=self._config,
            max_tokens=self._max_tokens,
            max_positions=getattr(self._model.config.get_text_config(), "max_position_embeddings", None),
            seed=call_seed(self._config.seed, self.calls + 1),
            tokenizer=self._tokenizer,
            sampled_size=self.vocabulary.sampled_size,
        )
        self.vocabulary.check(call.settings)
        return call

    def next_seed(self) -> int:
        """A seed for a call that is handed on without being opened."""
        self.calls += 1
        return call_seed(self._config.seed, self.calls)
