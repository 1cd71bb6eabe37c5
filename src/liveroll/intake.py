"""Prompts and settings on their way in: read, resolved, and checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from liveroll.call import Call, make_call, spread_sampling
from liveroll.config import RolloutConfig
from liveroll.model.resolver import SettingsResolver
from liveroll.prompts import PromptBatch, Prompts, padding_token, read_prompts
from liveroll.sampling_config import SamplingConfig
from liveroll.streams import call_seed
from liveroll.vocabulary import Vocabulary

Sampling = SamplingConfig | Sequence[SamplingConfig]


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
        self._calls = 0

    def read(self, prompts: Prompts, sampling: Sampling | None) -> tuple[PromptBatch, list[SamplingConfig]]:
        """Token ids of the prompts, and the settings of each."""
        batch = read_prompts(
            prompts,
            tokenizer=self._tokenizer,
            pad_token_id=padding_token(self._model, self._tokenizer),
            vocab_size=self.vocabulary.size,
        )
        return batch, spread_sampling(SamplingConfig() if sampling is None else sampling, len(batch.prompts))

    def open(self, prompts: PromptBatch, settings: Sequence[SamplingConfig]) -> Call:
        """A call with resolved settings, its lengths checked. A call that is refused uses no seed up."""
        call = self.draft(prompts, settings)
        self._calls += 1
        return call

    def draft(self, prompts: PromptBatch, settings: Sequence[SamplingConfig]) -> Call:
        """The call that `open` would make. It uses no seed up, so it is not to be run."""
        resolved = self._resolver.resolve(settings, prompts, padding_token(self._model, self._tokenizer))
        self.vocabulary.check(resolved)
        return make_call(
            prompts,
            resolved,
            config=self._config,
            max_tokens=self._max_tokens,
            max_positions=getattr(self._model.config.get_text_config(), "max_position_embeddings", None),
            seed=call_seed(self._config.seed, self._calls + 1),
            tokenizer=self._tokenizer,
            sampled_size=self.vocabulary.sampled_size,
        )

    def next_seed(self) -> int:
        """A seed for a call that is handed on without being opened."""
        self._calls += 1
        return call_seed(self._config.seed, self._calls)
