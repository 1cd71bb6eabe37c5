"""Jobs as the model will be given them, and those that it cannot be given, found before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from jinja2 import TemplateError

from liveroll.call import make_call
from liveroll.config import RolloutConfig
from liveroll.errors import ConfigError, PromptError
from liveroll.model.inherited import check_inherited
from liveroll.model.resolver import SettingsResolver
from liveroll.prompts import Prompts, padding_token, read_prompts
from liveroll.sampling_config import SamplingConfig
from liveroll.starts import Start
from liveroll.tools.checkpoint import Checkpoint
from liveroll.tools.jobs import BadLine, Job


@dataclass(frozen=True)
class FittedJob:
    """A job that can be run.

    Attributes:
        job: the job.
        prompt_ids: its prompt in tokens.
        sampling: its settings, the budget settled. An inherited `max_length` counts the padding of the batch, so
            the budget would otherwise depend on which prompts are left to do.
    """

    job: Job
    prompt_ids: list[int]
    sampling: SamplingConfig


def fit_jobs(
    jobs: Sequence[Job], checkpoint: Checkpoint, config: RolloutConfig, max_tokens: int | None
) -> tuple[list[FittedJob], list[BadLine]]:
    """Hold every job to all that the engine asks of a call.

    Args:
        jobs: what to run.
        checkpoint: the model and tokenizer to run it with.
        config: the engine's.
        max_tokens: tokens in one of its prefill forwards, or None.

    Returns:
        The jobs that can be run, and the others.

    Raises:
        ConfigError: there is text to encode, and no tokenizer; or the model's generation configuration is wrong.
        UnsupportedGenerationError: the model's generation configuration asks for what the engine does not do.
    """
    if checkpoint.tokenizer is None and not all(_has_ids(job) for job in jobs):
        raise ConfigError("the model has no tokenizer, so every line must give prompt_ids")
    check_inherited(checkpoint.model)
    fit = _Fit(checkpoint, config, max_tokens)
    fitted: list[FittedJob] = []
    bad: list[BadLine] = []
    for job in jobs:
        try:
            fitted.append(fit(job))
        except (PromptError, ConfigError, TemplateError) as error:
            bad.append(BadLine(job.index + 1, str(error).replace("prompt 0", "the prompt", 1)))
    return fitted, bad


class _Fit:
    """Checks one job after another against one model."""

    def __init__(self, checkpoint: Checkpoint, config: RolloutConfig, max_tokens: int | None) -> None:
        self._model, self._tokenizer = checkpoint.model, checkpoint.tokenizer
        self._config = config
        self._max_tokens = max_tokens
        self._pad = padding_token(self._model, self._tokenizer)
        self._resolver = SettingsResolver(self._model)

    def __call__(self, job: Job) -> FittedJob:
        text_config = self._model.config.get_text_config()
        if _has_messages(job) and getattr(self._tokenizer, "chat_template", None) is None:
            raise PromptError("messages need a chat template, and the model's tokenizer has none; give prompt")
        batch = read_prompts(
            cast(Prompts, [job.prompt]),
            tokenizer=self._tokenizer,
            pad_token_id=self._pad,
            vocab_size=text_config.vocab_size,
        )
        (resolved,) = self._resolver.resolve([job.sampling], batch, self._pad)
        make_call(
            batch,
            (resolved,),
            (Start(),),
            config=self._config,
            max_tokens=self._max_tokens,
            max_positions=getattr(text_config, "max_position_embeddings", None),
            seed=0,
            tokenizer=self._tokenizer,
        )
        settled = replace(job.sampling, max_new_tokens=resolved.max_new_tokens, min_new_tokens=resolved.min_new_tokens)
        return FittedJob(job, batch.prompts[0].tolist(), settled)


def _has_ids(job: Job) -> bool:
    return isinstance(job.prompt, list) and isinstance(job.prompt[0], int)


def _has_messages(job: Job) -> bool:
    return isinstance(job.prompt, list) and isinstance(job.prompt[0], dict)
