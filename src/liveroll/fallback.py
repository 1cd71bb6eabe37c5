"""The fallback: a call that the engine cannot do exactly, left wholly to `model.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from liveroll.call import Call
from liveroll.config import SamplingConfig
from liveroll.model.generation import generate_kwargs
from liveroll.prompts import PromptBatch, padding_token
from liveroll.scheduling.request import Request
from liveroll.stopping import StopStrings
from liveroll.types import ResolvedSampling


def run_fallback(
    model: PreTrainedModel, prompts: PromptBatch, sampling: Sequence[SamplingConfig], seed: int, tokenizer: Any
) -> Call:
    """Generate with `model.generate`'s own configuration and sampler, which know no log-probabilities or streams.

    Args:
        model: in rollout mode, with its own attention.
        prompts: the prompts.
        sampling: the settings of each; prompts with equal settings share a batch.
        seed: seeds torch's generators where the settings give none.
        tokenizer: for stop strings.

    Returns:
        A call whose requests have all finished, and whose resolved settings are empty: they stayed with `generate`.
    """
    pad = padding_token(model, tokenizer)
    rows: dict[int, list[Request]] = {}
    for settings in dict.fromkeys(sampling):
        chosen = [index for index, entry in enumerate(sampling) if entry == settings]
        torch.manual_seed(seed if settings.seed is None else settings.seed)
        arguments = generate_kwargs(settings)
        if settings.stop:
            arguments["tokenizer"] = tokenizer
        output = model.generate(
            prompts.input_ids[chosen].to(model.device),
            attention_mask=prompts.attention_mask[chosen].to(model.device),
            **arguments,
        )
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        responses = sequences[:, prompts.width :].cpu().numpy()
        for place, index in enumerate(chosen):
            samples = responses[place * settings.n : (place + 1) * settings.n]
            rows[index] = [
                _finished(prompts, index, sample, tokens, settings, _stop_tokens(model, settings), pad, tokenizer)
                for sample, tokens in enumerate(samples)
            ]
    requests = [request for index in sorted(rows) for request in rows[index]]
    for row, request in enumerate(requests):
        request.row = row
    return Call(prompts, (), tuple(requests), None)


def _stop_tokens(model: PreTrainedModel, settings: SamplingConfig) -> tuple[int, ...]:
    if settings.stop_token_ids is not None:
        return settings.stop_token_ids
    eos = model.generation_config.eos_token_id
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)


def _finished(
    prompts: PromptBatch,
    index: int,
    sample: int,
    tokens: np.ndarray,
    settings: SamplingConfig,
    stop_tokens: tuple[int, ...],
    pad: int,
    tokenizer: Any,
) -> Request:
    """A request that ended where `generate` ended its row: at the first stop token or string, or at the width."""
    request = Request(
        row=0,
        prompt_index=index,
        sample_index=sample,
        prompt=prompts.prompts[index],
        padding_ids=prompts.padding_ids[index],
        sampling=_placeholder(settings, stop_tokens, pad, len(tokens)),
        stream=(0, 0),
    )
    ends = np.flatnonzero(np.isin(tokens, stop_tokens))
    request.tokens = tokens[: ends[0] + 1] if len(ends) else tokens
    request.finish_reason, request.stop = ("stop", int(request.tokens[-1])) if len(ends) else ("length", None)
    if settings.stop:
        search = StopStrings(tokenizer).search
        for end in range(1, len(request.tokens) + 1):
            if found := search(request, request.tokens[:end]):
                request.tokens, request.finish_reason, request.stop = request.tokens[:end], "stop", found
                break
    return request


def _placeholder(settings: SamplingConfig, stop: tuple[int, ...], pad: int, budget: int) -> ResolvedSampling:
    """What a request must carry to be reported; the settings that ran are `generate`'s own."""
    return ResolvedSampling(
        max_new_tokens=budget,
        min_new_tokens=0,
        n=settings.n,
        do_sample=False,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        stop_token_ids=stop,
        stop=tuple(settings.stop),
        seed=settings.seed,
        logprobs=False,
        pad_token_id=pad,
    )
