"""The generation settings a request really runs with: resolved as `model.generate` would, or refused."""

from __future__ import annotations

import copy
import reprlib
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from liveroll.errors import ConfigError, PromptError, UnsupportedGenerationError
from liveroll.model.generate_arguments import generate_kwargs
from liveroll.model.inherited import read_ids, read_number
from liveroll.model.single_tokens import read_bias, read_forbidden
from liveroll.model.switches import INSTEAD, refuse_unsupported
from liveroll.model.versions import PreparedGeneration, prepare_generation_config
from liveroll.sampling_config import SamplingConfig
from liveroll.types import ResolvedSampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def resolve_sampling(
    model: PreTrainedModel,
    sampling: SamplingConfig,
    *,
    prompt_width: int,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    vocab_size: int,
    pad_fallback: int | None = None,
) -> ResolvedSampling:
    """Resolve what a request leaves open, exactly as `model.generate` would for this padded batch.

    The model's `_prepare_generation_config` runs once, with the fields the request gives and copies of the
    batch. It decides what it would decide in `generate`, the repetition penalty included; the batch, PAD and
    everything else the request gives are not its to change.

    The number of samples is the request's alone: `n` has a default, so `num_return_sequences` of the model's
    generation configuration is never inherited. A greedy request may ask for several samples, all equal.

    A greedy request resolves to `temperature` 1, `top_k` 0, `top_p` 1 and `min_p` 0: none has an effect.

    Args:
        model: a Hugging Face causal LM. Its `generation_config` is left as found, but for the replacement that
            4.57 itself makes where `model.config` was modified to control generation.
        sampling: the request.
        prompt_width: T, the width of the batch, padding included; `max_length` and `min_length` count it.
        input_ids: `[B, T]` int64, left-padded.
        attention_mask: `[B, T]`, nonzero at prompt tokens.
        vocab_size: number of token ids of the model.
        pad_fallback: PAD where the configuration has neither PAD nor EOS, such as the tokenizer's; 0 if None.

    Raises:
        ConfigError: transformers refuses the settings, a number is out of range or a token does not exist.
        PromptError: `max_length` leaves no room for a response.
        UnsupportedGenerationError: the settings ask for something the engine does not do, or the preparer
            changed the batch, PAD or what the request gives.
    """
    biased = tuple(dict(sampling.logit_bias or ()))
    _check_vocabulary("SamplingConfig.logit_bias", biased, vocab_size)
    _check_vocabulary("SamplingConfig.forbidden_tokens", sampling.forbidden_tokens or (), vocab_size)
    request = _preparer_kwargs(model, sampling)
    batch = {"input_ids": input_ids, "attention_mask": attention_mask}
    handed = {name: tensor.clone() for name, tensor in batch.items()}
    try:
        prepared = prepare_generation_config(model, {**copy.deepcopy(request), **handed})
    except ValueError as error:
        raise ConfigError(f"transformers refuses the generation settings: {error}") from error
    config = prepared.config
    refuse_unsupported(config)
    _refuse_changed_batch(prepared.model_kwargs, handed, batch)
    _refuse_changed_request(config, request)

    stop_token_ids = read_ids(config.eos_token_id)
    stop_field = "generation_config.eos_token_id" if sampling.stop_token_ids is None else "stop_token_ids"
    _check_vocabulary(stop_field, stop_token_ids, vocab_size)
    pad_token_id = _resolve_pad(config, model.generation_config.pad_token_id, stop_token_ids, pad_fallback)
    _check_vocabulary("pad_token_id", (pad_token_id,), vocab_size)

    max_new_tokens = _resolve_budget(model, prepared, prompt_width)
    min_new_tokens = config.min_new_tokens
    if min_new_tokens is None:
        min_new_tokens = max((config.min_length or 0) - prompt_width, 0)
    do_sample = bool(config.do_sample)
    forbidden, first_forbidden = read_forbidden(config, stop_token_ids, vocab_size)
    return ResolvedSampling(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min(min_new_tokens, max_new_tokens),
        n=sampling.n,
        do_sample=do_sample,
        temperature=read_number(config, "temperature", unset=1.0) if do_sample else 1.0,
        top_k=int(read_number(config, "top_k", unset=0)) if do_sample else 0,
        top_p=read_number(config, "top_p", unset=1.0) if do_sample else 1.0,
        min_p=read_number(config, "min_p", unset=0.0) if do_sample else 0.0,
        repetition_penalty=read_number(config, "repetition_penalty", unset=1.0),
        stop_token_ids=stop_token_ids,
        stop=tuple(sampling.stop),
        include_stop=sampling.include_stop,
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        pad_token_id=pad_token_id,
        presence_penalty=float(sampling.presence_penalty),
        frequency_penalty=float(sampling.frequency_penalty),
        logit_bias=read_bias(config, vocab_size),
        forbidden_tokens=forbidden,
        first_forbidden_tokens=first_forbidden,
        raw_logprobs=sampling.raw_logprobs,
        top_logprobs=sampling.top_logprobs,
        kept_tokens=sampling.kept_tokens,
    )


def _preparer_kwargs(model: PreTrainedModel, sampling: SamplingConfig) -> dict[str, Any]:
    kwargs = generate_kwargs(sampling)
    kwargs.pop("stop_strings", None)  # the engine matches strings itself
    if not kwargs.get("do_sample", model.generation_config.do_sample):
        kwargs["num_return_sequences"] = 1  # transformers refuses several greedy samples; here they are copies
    return kwargs


def _refuse_changed_batch(
    model_kwargs: dict[str, Any], handed: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]
) -> None:
    for name, tensor in handed.items():
        if model_kwargs.get(name) is not tensor:
            raise _preparer_error(f"{'replaced' if name in model_kwargs else 'dropped'} {name}")
    unchanged = [(tensor == batch[name]).all() for name, tensor in handed.items()]
    if not torch.stack(unchanged).all():  # one read of the device for the whole batch
        edited = [name for name, tensor in handed.items() if not torch.equal(tensor, batch[name])]
        raise _preparer_error(f"edited {' and '.join(edited)} in place")
    added = [name for name, value in model_kwargs.items() if name not in handed and value is not None]
    if added:
        raise _preparer_error(f"added {', '.join(added)} to the arguments of forward")


def _refuse_changed_request(config: GenerationConfig, request: dict[str, Any]) -> None:
    for name, wanted in request.items():
        value = getattr(config, name)
        if name == "eos_token_id":
            wanted, value = read_ids(wanted), read_ids(value)
        if name != "repetition_penalty" and value != wanted:
            raise _preparer_error(f"changed {name} from the requested {wanted!r} to {value!r}")


def _preparer_error(what: str) -> UnsupportedGenerationError:
    return UnsupportedGenerationError(f"the model's _prepare_generation_config {what}: correct it, {INSTEAD}")


def _resolve_budget(model: PreTrainedModel, prepared: PreparedGeneration, prompt_width: int) -> int:
    """Count the tokens `generate` would add to a batch of this width (its `_prepare_generated_length`)."""
    config = prepared.config
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    longest = config.max_length
    if longest is None:
        raise ConfigError("neither max_new_tokens nor max_length is set: give SamplingConfig.max_new_tokens")
    if prepared.max_length_is_default:
        longest += prompt_width
        positions = getattr(model.config, "max_position_embeddings", None)
        longest = longest if positions is None else min(longest, positions)
    if longest <= prompt_width:
        raise PromptError(
            f"max_length={longest} leaves no room after prompts padded to {prompt_width} tokens: "
            "give SamplingConfig.max_new_tokens, raise max_length or shorten the prompts"
        )
    return int(longest - prompt_width)


def _resolve_pad(
    config: GenerationConfig, own: int | None, stop_token_ids: tuple[int, ...], fallback: int | None
) -> int:
    """Find PAD as `generate` does, and refuse another one that a custom preparer has put in its place."""
    candidates = (own, *stop_token_ids[:1], fallback, 0)
    pad = next(candidate for candidate in candidates if candidate is not None)
    if config.pad_token_id not in (own, pad):
        raise _preparer_error(f"changed pad_token_id from {pad} to {config.pad_token_id!r}")
    return pad


def _check_vocabulary(field: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    outside = [token for token in token_ids if not 0 <= token < vocab_size]
    if outside:
        raise ConfigError(f"{field} holds {reprlib.repr(outside)}; the ids of this model are 0 to {vocab_size - 1}")
