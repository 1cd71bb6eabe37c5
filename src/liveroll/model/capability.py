"""What the engine can run exactly, told from a model's class and configuration alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel

from liveroll.errors import UnsupportedModelError
from liveroll.model.geometry import ModelShape

KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})

# Rotary scalings whose angles depend on the longest row of the batch, so that a row's result would too.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})

_PLAIN_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ())


def _rope_types(config: Any) -> set[str]:
    found: set[Any] = set()
    for name in ("rope_parameters", "rope_scaling"):
        settings = getattr(config, name, None) or {}
        for entry in (settings, *settings.values()):
            if isinstance(entry, dict):
                found.add(entry.get("rope_type", entry.get("type")))
    return found - {None}


def _is_quantised(model: PreTrainedModel) -> bool:
    settings = getattr(model.config, "quantization_config", None)
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    # A GGUF file is dequantised as it is loaded; only its configuration still speaks of quantisation.
    dequantised = settings is None or getattr(method, "value", method) == "gguf"
    return not dequantised or any(p.dtype not in _PLAIN_DTYPES for p in model.parameters())


def _lacks_positions(model: PreTrainedModel) -> bool:
    names = inspect.signature(type(model).forward).parameters
    return not {"input_ids", "position_ids"} <= set(names)


def _devices(model: PreTrainedModel) -> set[str]:
    return {str(parameter.device) for parameter in model.parameters()}


# Each row: what is asked of the model, what to say where the answer is yes, and whether `model.generate` can do it.
_REFUSALS: tuple[tuple[Callable[[PreTrainedModel, Any], bool], str, bool], ...] = (
    (lambda m, c: not isinstance(m, GenerationMixin), "it has no language-model head to generate with", False),
    (
        lambda m, c: bool(getattr(m.config, "is_encoder_decoder", False)),
        "it is an encoder-decoder model",
        False,
    ),
    (
        lambda m, c: any(hasattr(m.config, name) for name in ("vision_config", "audio_config")),
        "it takes images or audio; pass its text model alone",
        True,
    ),
    (lambda m, c: _is_quantised(m), "its weights are quantised; load it in fp32, fp16 or bf16", True),
    (
        lambda m, c: "meta" in _devices(m),
        "some of its parameters are on the meta device and hold no values",
        False,
    ),
    (lambda m, c: len(_devices(m)) > 1, "its parameters are on several devices", True),
    (lambda m, c: getattr(c, "is_causal", True) is False, "its attention is not causal", False),
    (lambda m, c: _lacks_positions(m), "its forward does not take position_ids, so it places tokens by itself", True),
    (
        lambda m, c: bool(_layer_types(c) - KNOWN_LAYERS),
        "it has layers that are neither full nor sliding attention",
        True,
    ),
    (
        lambda m, c: bool(_rope_types(c) & _BATCH_DEPENDENT_ROPE),
        "its rotary embedding (dynamic or longrope) depends on the longest row of the batch",
        True,
    ),
)


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model that its class or configuration shows the engine cannot run exactly.

    Raises:
        UnsupportedModelError: naming the reason.
    """
    config = model.config.get_text_config()
    for refuses, reason, generates in _REFUSALS:
        if refuses(model, config):
            raise UnsupportedModelError(f"{type(model).__name__} cannot be rolled out: {reason}", generates=generates)


def check_shape(shape: ModelShape, implementation: str) -> None:
    """Refuse a model whose own attention does not do what its layers ask of it.

    Args:
        shape: the model's layers.
        implementation: name of the model's own attention implementation.

    Raises:
        UnsupportedModelError: naming the reason.
    """
    if implementation == "sdpa" and any(layer.traits.softcap for layer in shape.layers):
        raise UnsupportedModelError(
            "the model's attention is soft-capped, and its sdpa implementation drops the soft-cap; load it with "
            "attn_implementation='eager'"
        )
