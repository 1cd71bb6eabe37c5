"""The fallback: a call that the engine cannot do exactly, left wholly to `model.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from liveroll.call import Call, check_room
from liveroll.config import RolloutConfig
from liveroll.errors import ConfigError, UnsupportedGenerationError, UnsupportedModelError
from liveroll.model.generate_arguments import generate_kwargs, own_generate
from liveroll.prompts import PromptBatch, padding_token
from liveroll.sampling_config import SamplingConfig
from liveroll.scheduling.request import Request
from liveroll.stopping import StopStrings
from liveroll.types import ResolvedSampling


class _Known(LogitsProcessor):  # type: ignore[misc]
    """Excludes the ids that may not be sampled because no tokenizer knows them."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        outside = torch.arange(scores.shape[-1], device=scores.device) >= self._size
        return scores.masked_fill(outside, float("-inf"))


def check_fallback(
    refusal: UnsupportedModelError | UnsupportedGenerationError, config: RolloutConfig, *, plain: bool = True
) -> None:
    """Raise a refusal again unless the call may go to `model.generate` instead, which can do plain calls only."""
    if config.fallback == "error" or not refusal.generates:
        raise refusal
    if not plain:
        raise type(refusal)(
            f"{refusal}; and the fallback, model.generate, knows neither response_prefix nor continue_from nor "
            "limits of a call nor groups"
        ) from refusal


def run_fallback(
    model: PreTrainedModel,
    prompts: PromptBatch,
    sampling: Sequence[SamplingConfig],
    seed: int,
    tokenizer: Any,
    sampled_size: int,
) -> Call:
    """Generate with `model.generate`'s own configuration and sampler, which know no log-probabilities or streams.

    A greedy prompt of several samples is generated once and copied, as the engine does it.

    Args:
        model: in rollout mode, with its own attention.
        prompts: the prompts.
        sampling: the settings of each; prompts with equal settings share a batch.
        seed: seeds torch's generators where the settings give none.
        tokenizer: for stop strings.
        sampled_size: ids below this may be sampled.

    Returns:
        A call whose requests have all finished, and whose resolved settings are empty: they stayed with `generate`.

    Raises:
        ConfigError: there are stop strings and no tokenizer, or penalties that `generate` does not know.
        PromptError: a prompt and its budget are longer than the model allows.
    """
    for settings in sampling:
        if settings.presence_penalty or settings.frequency_penalty:
            raise ConfigError("model.generate, which this call falls back to, knows no presence or frequency penalty")
    pad = padding_token(model, tokenizer)
    placeholders = [_placeholder(model, settings, pad) for settings in sampling]
    searching = StopStrings(tokenizer) if any(settings.stop for settings in placeholders) else None
    _check_lengths(model, prompts, placeholders)
    rows: dict[int, list[Request]] = {}
    for settings in dict.fromkeys(sampling):
        chosen = [index for index, entry in enumerate(sampling) if entry == settings]
        _seed(model.device, seed if settings.seed is None else settings.seed)
        arguments = generate_kwargs(settings)
        if searching is not None:
            arguments["tokenizer"] = tokenizer
        if sampled_size < model.config.get_text_config().vocab_size:
            arguments["logits_processor"] = LogitsProcessorList([_Known(sampled_size)])
        if _is_plain_greedy(model, arguments):
            arguments["num_return_sequences"] = 1
        output = own_generate(model)(
            prompts.input_ids[chosen].to(model.device),
            synced_gpus=False,  # `in_step` sees to it, in subgroups too
            attention_mask=prompts.attention_mask[chosen].to(model.device),
            **arguments,
        )
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        responses = sequences[:, prompts.width :].cpu().numpy()
        responses = responses.repeat(len(chosen) * settings.n // len(responses), axis=0)
        for place, index in enumerate(chosen):
            samples = responses[place * settings.n : (place + 1) * settings.n]
            rows[index] = [
                _finished(prompts, index, sample, tokens, placeholders[index], searching)
                for sample, tokens in enumerate(samples)
            ]
    requests = [request for index in sorted(rows) for request in rows[index]]
    for row, request in enumerate(requests):
        request.row = row
    return Call(prompts, (), tuple(requests), None)


def _seed(device: torch.device, seed: int) -> None:
    """As `torch.manual_seed` does, but for other GPUs: in rollout mode the model's is the current one."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _is_plain_greedy(model: PreTrainedModel, arguments: dict[str, Any]) -> bool:
    """Whether `generate` takes the most likely token, so that it refuses to return several samples."""
    own = model.generation_config
    return not arguments.get("do_sample", own.do_sample) and own.num_beams in (None, 1)


def _check_lengths(model: PreTrainedModel, prompts: PromptBatch, settings: Sequence[ResolvedSampling]) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for index, (prompt, entry) in enumerate(zip(prompts.prompts, settings, strict=True)):
        check_room(index, len(prompt), entry.max_new_tokens, limit, "the model's max_position_embeddings")


def _finished(
    prompts: PromptBatch,
    index: int,
    sample: int,
    tokens: np.ndarray,
    settings: ResolvedSampling,
    searching: StopStrings | None,
) -> Request:
    """A request that ended where `generate` ended its row: at the first stop token or string, or at the width."""
    request = Request(
        row=0,
        prompt_index=index,
        sample_index=sample,
        group=index,
        prompt=prompts.prompts[index],
        padding_ids=prompts.padding_ids[index],
        sampling=settings,
        stream=(0, 0),
    )
    ends = np.flatnonzero(np.isin(tokens, settings.stop_token_ids))
    request.tokens = tokens[: ends[0] + 1] if len(ends) else tokens
    request.finish_reason, request.stop = ("stop", int(request.tokens[-1])) if len(ends) else ("length", None)
    if searching is not None and settings.stop:
        for end in range(1, len(request.tokens) + 1):
            if found := searching.search(request, request.tokens[:end]):
                request.tokens, request.finish_reason, request.stop = request.tokens[:end], "stop", found
                break
    return request


def _placeholder(model: PreTrainedModel, settings: SamplingConfig, pad: int) -> ResolvedSampling:
    """What a request must carry to be checked and reported; the settings that run are `generate`'s own."""
    own = model.generation_config
    eos, strings = own.eos_token_id, own.stop_strings or ()
    ends = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    return ResolvedSampling(
        max_new_tokens=settings.max_new_tokens or own.max_new_tokens or 0,
        min_new_tokens=0,
        n=settings.n,
        do_sample=False,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        stop_token_ids=ends if settings.stop_token_ids is None else settings.stop_token_ids,
        stop=tuple(settings.stop) or ((strings,) if isinstance(strings, str) else tuple(strings)),
        include_stop=settings.include_stop,
        seed=settings.seed,
        logprobs=False,
        pad_token_id=pad,
    )
