"""One engine on the model that a trainer of TRL trains, and what it returns in TRL's form."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from liveroll.adapters.trl_settings import read_settings
from liveroll.config import RolloutConfig, check_config
from liveroll.engine import RolloutEngine
from liveroll.errors import EngineStateError
from liveroll.model.unwrap import unwrap
from liveroll.sampling_config import SamplingConfig
from liveroll.types import RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TrainerRollouts:
    """The rollouts of a trainer: one engine on its model, for as long as it trains.

    Random numbers come from PyTorch's generator, which TRL seeds differently on every process, so processes that hold
    the same prompt draw different samples.

    Args:
        config: how the engine runs. By default all completions that a process generates at a time decode side by
            side, and ids that the tokenizer does not know may be sampled, as the training forward counts them too.
        sleep: give the KV memory back to the trainer after each rollout.
    """

    def __init__(self, config: RolloutConfig | None = None, *, sleep: bool = False) -> None:
        self.config = None if config is None else check_config(config)
        self.last: RolloutBatch | None = None
        """What the last rollout returned: completions, log-probabilities, statistics."""
        self._sleep = sleep
        self._model: PreTrainedModel | None = None
        self._engine: RolloutEngine | None = None

    @property
    def engine(self) -> RolloutEngine:
        """The engine.

        Raises:
            EngineStateError: nothing was rolled out yet.
        """
        if self._engine is None:
            raise EngineStateError("there is no engine before the first rollout")
        return self._engine

    def run(self, trainer: Any, prompts: list[list[int]]) -> RolloutBatch:
        """One completion for each prompt, with the trainer's settings.

        Args:
            trainer: the trainer whose model and settings to use.
            prompts: token ids.

        Raises:
            ConfigError: the trainer has settings that the engine does not do.
            LiverollError: whatever `RolloutEngine.generate` raises.
        """
        settings = replace(read_settings(trainer), seed=int(torch.randint(2**62, ())))
        engine = self._provide(trainer)
        try:
            self.last = engine.generate(prompts, [_within(settings, len(prompt), trainer) for prompt in prompts])
        finally:
            if self._sleep:
                engine.sleep()
        return self.last

    def shutdown(self) -> None:
        """Free all that is held between rollouts. The next one takes it again."""
        if self._engine is not None:
            self._engine.shutdown()

    def _provide(self, trainer: Any) -> RolloutEngine:
        model = unwrap(trainer.model)
        if self._engine is None or self._model is not model:
            self.shutdown()
            args = trainer.args
            config = self.config or RolloutConfig(
                max_slots=args.per_device_train_batch_size * args.steps_per_generation, sample_padded_vocabulary=True
            )
            tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
            self._model, self._engine = model, RolloutEngine(trainer.model, tokenizer, config)
        return self._engine


def as_lists(batch: RolloutBatch) -> tuple[list[list[int]], list[list[float]] | None]:
    """Token ids of each completion and their log-probabilities; None for these where `model.generate` drew them."""
    ids = [list(completion.token_ids) for completion in batch.completions]
    if batch.response_logprobs is None:
        return ids, None
    return ids, [list(completion.logprobs or ()) for completion in batch.completions]


def _within(settings: SamplingConfig, length: int, trainer: Any) -> SamplingConfig:
    """The settings for a prompt of that length. Conversations grow with each tool call, and positions end."""
    positions = getattr(unwrap(trainer.model).config.get_text_config(), "max_position_embeddings", None)
    budget = settings.max_new_tokens
    if positions is None or budget is None or length + budget <= positions or length >= positions:
        return settings
    return replace(settings, max_new_tokens=positions - length)
