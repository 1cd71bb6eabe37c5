"""Which generation settings of transformers the engine does exactly, field by field; it refuses all others."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

import torch

from liveroll.errors import UnsupportedGenerationError
from liveroll.model.versions import default_generation_fields

if TYPE_CHECKING:
    from transformers import GenerationConfig

ANY: Any = object()
"""The engine reads the field itself, or the field is without effect where all others are neutral."""

NEUTRAL: dict[str, Any] = {
    # read by the engine
    "max_length": ANY,
    "max_new_tokens": ANY,
    "min_length": ANY,
    "min_new_tokens": ANY,
    "num_return_sequences": ANY,
    "do_sample": ANY,
    "temperature": ANY,
    "top_k": ANY,
    "top_p": ANY,
    "min_p": ANY,
    "repetition_penalty": ANY,
    "sequence_bias": ANY,
    "bad_words_ids": ANY,
    "suppress_tokens": ANY,
    "begin_suppress_tokens": ANY,
    "eos_token_id": ANY,
    "pad_token_id": ANY,
    # another search
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0.0),
    "constraints": (None,),
    "force_words_ids": (None,),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "early_stopping": ANY,
    "length_penalty": ANY,
    "low_memory": ANY,
    # tokens drafted by something else
    "use_mtp": (None, False),
    "is_assistant": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "assistant_ensemble_weight": (None,),
    "speculation_type": (None,),
    "assistant_confidence_threshold": ANY,
    "assistant_lookbehind": ANY,
    "max_matching_ngram_size": ANY,
    "num_assistant_tokens": ANY,
    "num_assistant_tokens_schedule": ANY,
    "target_lookbehind": ANY,
    # other processors of the logits
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "top_h": (None,),
    "renormalize_logits": (None, False),
    "remove_invalid_values": (None, False),
    # the prompt, and the end of a response
    "token_healing": (None, False),
    "bos_token_id": ANY,
    "decoder_start_token_id": ANY,
    "max_time": (None,),
    "stop_strings": (None, [], ""),
    # other outputs
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "return_dict_in_generate": (None, False),
    # the cache: none of these changes a token; a quantized one does, and `paged` runs another loop
    "use_cache": (None, True),
    "cache_implementation": (
        None,
        "dynamic",
        "dynamic_full",
        "static",
        "offloaded",
        "offloaded_static",
        "sliding_window",
        "hybrid",
        "hybrid_chunked",
        "offloaded_hybrid",
        "offloaded_hybrid_chunked",
    ),
    "cache_config": ANY,
    "max_cache_len": ANY,
    "prefill_chunk_size": ANY,
    "return_legacy_cache": ANY,
    # how it is run
    "compile_config": ANY,
    "continuous_batching_config": ANY,
    "disable_compile": ANY,
    "transformers_version": ANY,
}
"""The public fields of transformers 4.57 to 5.24, and the values under which each leaves the tokens alone."""

EMPTY: tuple[Any, ...] = (None, False, 0, "", [], (), {})
"""The values that a setting unknown to the table may have."""

INSTEAD = 'or let RolloutConfig(fallback="generate") hand the call to model.generate'


def refuse_unsupported(config: GenerationConfig) -> None:
    """Refuse a prepared configuration that asks for anything the engine would not do.

    A public attribute that is not in the table is refused as well, unless it is empty or holds the default of
    the installed transformers: a switch that nobody knows may change the tokens.

    Raises:
        UnsupportedGenerationError: names the field and its value.
    """
    defaults = default_generation_fields()
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if name in NEUTRAL:
            neutral, reason = NEUTRAL[name], "is not something the engine does"
        else:
            neutral, reason = (*EMPTY, defaults.get(name)), "is not a setting the engine knows"
        if neutral is ANY or (not isinstance(value, torch.Tensor) and value in neutral):
            continue
        setting = f"generation_config.{name}={reprlib.repr(value)}"
        raise UnsupportedGenerationError(f"{setting} {reason}: unset it, {INSTEAD}")
