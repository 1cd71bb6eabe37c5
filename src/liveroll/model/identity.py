"""What plans and files of costs are told of a model and of what it runs on."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import liveroll
from liveroll.attention.backend import name_backend
from liveroll.config import RolloutConfig, no_prefill_capture
from liveroll.errors import ConfigError
from liveroll.model.geometry import ModelShape
from liveroll.model.versions import AttentionSwitch
from liveroll.planning.costs_file import CostsOrigin, fingerprint_sources
from liveroll.planning.geometry import ModelGeometry


def counted_geometry(shape: ModelShape, dtype: torch.dtype) -> ModelGeometry:
    """The geometry of layers as they really attended.

    Args:
        shape: the model's layers.
        dtype: dtype of keys and values.
    """
    return ModelGeometry(
        layers=len(shape.layers),
        query_heads=tuple(layer.query_heads for layer in shape.layers),
        kv_heads=tuple(layer.kv_heads for layer in shape.layers),
        head_dim=tuple((layer.key_dim + layer.value_dim) // 2 for layer in shape.layers),
        element_bytes=dtype.itemsize,
    )


def declared_geometry(model: PreTrainedModel) -> ModelGeometry:
    """The geometry that a model's configuration gives, without a forward: all heads, also where ranks share them.

    Raises:
        ConfigError: it does not give one.
    """
    config: Any = model.config.get_text_config()
    heads: Any = getattr(config, "num_attention_heads", None)
    head_dim: Any = getattr(config, "head_dim", None)
    if head_dim is None and isinstance(heads, int):
        head_dim = getattr(config, "hidden_size", 0) // heads
    try:
        return ModelGeometry(
            layers=getattr(config, "num_hidden_layers", None),  # type: ignore[arg-type]
            query_heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim,
            element_bytes=model.dtype.itemsize,
        )
    except ConfigError as error:
        raise ConfigError(f"the configuration of {type(model).__name__} does not give its geometry: {error}") from error


def describe_origin(model: PreTrainedModel, config: RolloutConfig, ranks: int) -> CostsOrigin:
    """What costs measured with this model, here and now, are costs of.

    Args:
        model: the model.
        config: the engine's.
        ranks: processes that hold shards of the model.

    Raises:
        ConfigError: the model's configuration does not give its geometry.
    """
    return CostsOrigin(
        model_type=str(model.config.model_type),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        geometry=declared_geometry(model),
        ranks=ranks,
        dtype=str(model.dtype).removeprefix("torch."),
        device=_device_name(model.device),
        padded_attention=AttentionSwitch(model).name,
        packed_attention=name_backend(model.device),
        capture=config.capture is not False,
        prefill_capture=0 if no_prefill_capture(config, model.device.type) else config.prefill_capture_tokens,
        compile=config.compile is True or (config.compile == "auto" and model.device.type == "cuda"),
        fuse=config.fuse is not False,
        liveroll=liveroll.__version__,
        torch=torch.__version__,
        transformers=transformers.__version__,
        triton=_triton_version(),
        sources=fingerprint_sources(),
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"cpu ({platform.processor() or platform.machine()}, {torch.get_num_threads()} threads)"
    return device.type


def _triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"
