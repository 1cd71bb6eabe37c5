"""Turning jobs into token ids, and finding those that the model cannot be given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from liveroll.errors import ConfigError, PromptError
from liveroll.tools.checkpoint import Checkpoint
from liveroll.tools.jobs import BadLine, Job


def encode_jobs(
    jobs: Sequence[Job], checkpoint: Checkpoint
) -> tuple[list[list[int]], list[Job], tuple[BadLine, ...]]:
    """Encode every job's prompt as the engine would.

    Args:
        jobs: what to encode.
        checkpoint: the model they are for.

    Returns:
        The token ids of the jobs that fit the model, those jobs, and the others as bad lines.

    Raises:
        ConfigError: a prompt is text or messages and the checkpoint has no tokenizer.
    """
    prompts: list[list[int]] = []
    good: list[Job] = []
    bad: list[BadLine] = []
    for job in jobs:
        try:
            prompts.append(_encode(job, checkpoint))
        except PromptError as error:
            bad.append(BadLine(job.index + 1, str(error)))
        else:
            good.append(job)
    return prompts, good, tuple(bad)


def _encode(job: Job, checkpoint: Checkpoint) -> list[int]:
    ids = _ids_of(job, checkpoint.tokenizer)
    if not ids:
        raise PromptError("the prompt has no tokens")
    size = checkpoint.model.get_input_embeddings().num_embeddings
    if max(ids) >= size:
        raise PromptError(f"prompt_ids holds {max(ids)}, and the model has only the tokens 0 to {size - 1}")
    return ids


def _ids_of(job: Job, tokenizer: Any | None) -> list[int]:
    if isinstance(job.prompt, list) and isinstance(job.prompt[0], int):
        return list(job.prompt)
    if tokenizer is None:
        raise ConfigError("the model has no tokenizer, so every line must give prompt_ids")
    if isinstance(job.prompt, str):
        return list(tokenizer(job.prompt)["input_ids"])
    if tokenizer.chat_template is None:
        raise PromptError("messages need a chat template, and the model's tokenizer has none; give prompt")
    from jinja2 import TemplateError

    try:
        encoded = tokenizer.apply_chat_template(
            job.prompt, add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except TemplateError as error:
        raise PromptError(f"the chat template refuses the messages: {error}") from error
    return list(encoded["input_ids"])
