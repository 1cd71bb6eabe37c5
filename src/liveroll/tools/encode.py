"""Turning jobs into token ids, and finding those that the model cannot be given."""

from __future__ import annotations

from collections.abc import Sequence

from liveroll.config import RolloutConfig
from liveroll.errors import ConfigError
from liveroll.tools.checkpoint import Checkpoint
from liveroll.tools.jobs import BadLine, Job


def encode_jobs(
    jobs: Sequence[Job], checkpoint: Checkpoint, config: RolloutConfig
) -> tuple[list[list[int]], list[Job], tuple[BadLine, ...]]:
    """Encode every job's prompt as the engine does.

    Args:
        jobs: what to encode.
        checkpoint: the model they are for.
        config: the engine they are for.

    Returns:
        The token ids of the jobs that can be run, those jobs, and the others as bad lines.

    Raises:
        ConfigError: a prompt is text or messages and the checkpoint has no tokenizer.
    """
    from jinja2 import TemplateError

    from liveroll.prompts import read_prompts

    if checkpoint.tokenizer is None and not all(_is_ids(job) for job in jobs):
        raise ConfigError("the model has no tokenizer, so every line must give prompt_ids")
    size = checkpoint.model.get_input_embeddings().num_embeddings
    limit = config.prefill_max_tokens
    prompts: list[list[int]] = []
    good: list[Job] = []
    bad: list[BadLine] = []
    for job in jobs:
        try:
            batch = read_prompts([job.prompt], tokenizer=checkpoint.tokenizer, pad_token_id=0, vocab_size=size)
        except (ValueError, TemplateError) as error:
            bad.append(BadLine(job.index + 1, str(error).replace("prompt 0", "the prompt", 1)))
            continue
        ids = batch.prompts[0].tolist()
        if limit is not None and len(ids) > limit:
            bad.append(
                BadLine(
                    job.index + 1, f"the prompt has {len(ids)} tokens, and {limit} is the most there can be"
                )
            )
            continue
        prompts.append(ids)
        good.append(job)
    return prompts, good, tuple(bad)


def _is_ids(job: Job) -> bool:
    return isinstance(job.prompt, list) and isinstance(job.prompt[0], int)
