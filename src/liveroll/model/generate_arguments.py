"""What hands a request, or settings that are resolved, to `model.generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from liveroll.model.versions import default_generation_fields
from liveroll.sampling_config import SamplingConfig
from liveroll.types import ResolvedSampling


def own_generate(model: PreTrainedModel) -> Callable[..., Any]:
    """The model's `generate`, without what torch's `register_fsdp_forward_method` puts around it, as Trainer does.

    That gathers weights once around the whole of it. Their hooks do so in every forward, where they are not gathered
    already, and ranks do not all call `generate` equally often.
    """
    generate: Any = model.generate
    while getattr(generate, "__globals__", {}).get("__name__", "").startswith("torch.distributed.fsdp."):
        generate = generate.__wrapped__
    return generate  # type: ignore[no-any-return]


def generate_kwargs(sampling: SamplingConfig) -> dict[str, Any]:
    """Return the keyword arguments that hand a request to `model.generate` unchanged.

    A field left at None is left out, so that `generate` inherits it. With `stop`, `generate` needs a
    `tokenizer` argument as well. `seed`, `include_stop`, the presence and frequency penalties and what is reported of
    tokens have no counterpart.
    """
    names = ("max_new_tokens", "min_new_tokens", "top_k", "top_p", "min_p")
    kwargs = {name: getattr(sampling, name) for name in names if getattr(sampling, name) is not None}
    if sampling.temperature is not None:
        kwargs["do_sample"] = sampling.temperature > 0
    # transformers refuses a whole number as temperature or penalty
    if sampling.temperature:
        kwargs["temperature"] = float(sampling.temperature)
    if sampling.repetition_penalty is not None:
        kwargs["repetition_penalty"] = float(sampling.repetition_penalty)
    if sampling.logit_bias is not None:
        kwargs["sequence_bias"] = _sequence_bias(dict(sampling.logit_bias))
    if sampling.forbidden_tokens is not None:
        kwargs["suppress_tokens"], kwargs["bad_words_ids"] = list(sampling.forbidden_tokens) or None, None
    if sampling.stop_token_ids is not None:
        kwargs["eos_token_id"] = list(sampling.stop_token_ids) or None
    if sampling.stop:
        kwargs["stop_strings"] = list(sampling.stop)
    kwargs["num_return_sequences"] = sampling.n
    return kwargs


def to_generation_config(sampling: ResolvedSampling) -> GenerationConfig:
    """Return the complete configuration with which `model.generate` does what `sampling` says.

    Everything that `ResolvedSampling` does not hold is at its default, since `resolve_sampling` refuses the
    rest. Stop strings are left out, and the presence and frequency penalties, which `generate` does not know. Use it
    with `liveroll.model.versions.prepared_for_generate`.
    """
    fields = default_generation_fields()
    same = ("max_new_tokens", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p")
    fields.update({name: getattr(sampling, name) for name in (*same, "repetition_penalty", "pad_token_id")})
    fields.update(eos_token_id=list(sampling.stop_token_ids) or None, num_return_sequences=sampling.n)
    fields["sequence_bias"] = _sequence_bias(dict(sampling.logit_bias))
    fields["suppress_tokens"] = list(sampling.forbidden_tokens) or None
    fields["begin_suppress_tokens"] = list(sampling.first_forbidden_tokens) or None
    config = GenerationConfig()
    for name, value in fields.items():  # one by one: the constructor refuses several greedy samples
        setattr(config, name, value)
    return config


def _sequence_bias(biases: dict[int, float]) -> dict[tuple[int], float] | None:
    """Biases as a dictionary: in the lists that transformers takes too, 4.57 refuses token 0."""
    return {(token,): bias for token, bias in biases.items()} or None
