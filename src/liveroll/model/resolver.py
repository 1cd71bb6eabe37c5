"""The resolved settings of a call's prompts, worked out no more often than they must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from liveroll.model.generation import resolve_sampling
from liveroll.model.versions import has_own_preparer
from liveroll.prompts import PromptBatch
from liveroll.sampling_config import SamplingConfig
from liveroll.types import ResolvedSampling

_SCALARS = (bool, int, float, str, type(None))


class SettingsResolver:
    """Resolves settings, and remembers what transformers' own preparer made of equal ones.

    A model's own preparer may do anything, so it is asked in every call, once for each distinct request.

    Args:
        model: the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[tuple[Any, ...], ResolvedSampling] = {}
        self._inherited: tuple[Any, ...] = ()

    def resolve(
        self, sampling: Sequence[SamplingConfig], prompts: PromptBatch, pad: int
    ) -> tuple[ResolvedSampling, ...]:
        """Resolved settings of each prompt; those that differ in their seed alone are resolved once.

        Args:
            sampling: the settings of each prompt.
            prompts: the prompts.
            pad: PAD where the model's configuration has neither PAD nor EOS.

        Raises:
            LiverollError: whatever `resolve_sampling` raises.
        """
        inherited = self._what_is_inherited()
        if has_own_preparer(self._model) or inherited != self._inherited:
            self._known.clear()
            self._inherited = inherited
        settled: dict[int, ResolvedSampling] = {}
        for entry in sampling:
            # One object is often the settings of all prompts, and hashing it takes longer than all else here.
            if id(entry) not in settled:
                settled[id(entry)] = self._settle(entry, prompts, pad)
        return tuple(settled[id(entry)] for entry in sampling)

    def _settle(self, entry: SamplingConfig, prompts: PromptBatch, pad: int) -> ResolvedSampling:
        seedless = entry if entry.seed is None else replace(entry, seed=None)
        key = (seedless, prompts.width, pad)
        resolved = self._known.get(key)
        if resolved is None:
            resolved = self._known[key] = self._resolve(seedless, prompts, pad)
        return resolved if entry.seed is None else replace(resolved, seed=entry.seed)

    def _resolve(self, sampling: SamplingConfig, prompts: PromptBatch, pad: int) -> ResolvedSampling:
        return resolve_sampling(
            self._model,
            sampling,
            prompt_width=prompts.width,
            input_ids=prompts.input_ids.to(self._model.device),
            attention_mask=prompts.attention_mask.to(self._model.device),
            vocab_size=self._model.config.get_text_config().vocab_size,
            pad_fallback=pad,
        )

    def _what_is_inherited(self) -> tuple[Any, ...]:
        """Everything that settings left open can come from: the generation configuration, and legacy settings."""
        legacy = [(name, value) for name, value in vars(self._model.config).items() if isinstance(value, _SCALARS)]
        return id(self._model.generation_config), str(vars(self._model.generation_config)), tuple(legacy)
