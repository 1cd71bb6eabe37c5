"""What the benchmarks share: models of known geometry with random weights, timing, and results with their origin."""

from __future__ import annotations

import json
import platform
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import liveroll

RESULTS = Path(__file__).parent / "results"
COPY_BYTES_PER_SECOND = 4.14e12
"""Device-to-device copy rate measured on an H200: what the memory floor of a step is computed with."""

GEOMETRIES: dict[str, dict[str, Any]] = {
    "3B": {
        "model_type": "qwen2",
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 11008,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
    },
    "8B": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "max_position_embeddings": 40960,
        "use_sliding_window": False,
    },
    "32B": {
        "model_type": "qwen3",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 25600,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "max_position_embeddings": 40960,
        "use_sliding_window": False,
    },
    "MoE": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "max_position_embeddings": 40960,
        "use_sliding_window": False,
    },
}


def build(
    name: str,
    dtype: torch.dtype,
    device: str,
    std: float = 0.02,
    divide: Callable[[PreTrainedModel], None] | None = None,
) -> PreTrainedModel:
    """A model of a known geometry with seeded random weights, made on the device.

    `divide` may share the model out to ranks before it takes memory; each then draws its part by itself.
    """
    settings = dict(GEOMETRIES[name])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if divide is not None:
        divide(model)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for path, whole in model.named_parameters():
            parameter = whole.to_local() if isinstance(whole, DTensor) else whole
            if parameter.dim() > 1:
                parameter.normal_(0.0, std, generator=generator)
            else:
                parameter.fill_(1.0 if "norm" in path else 0.0)
        for module in model.modules():
            if hasattr(module, "inv_freq") and hasattr(module, "compute_default_rope_parameters"):
                inverse, module.attention_scaling = module.compute_default_rope_parameters(module.config)
                module.inv_freq = inverse.to(device)
                module.original_inv_freq = inverse.to(device)
    if config.tie_word_embeddings:
        model.tie_weights()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def need_gpu(parser: ArgumentParser) -> None:
    """End a benchmark of a GPU at once where there is none, rather than by what torch says of its first tensor."""
    if not torch.cuda.is_available():
        parser.error("this measures on a GPU, and there is none")


def prompts_of(lengths: list[int], vocab_size: int, seed: int = 1) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1000, vocab_size - 1000, (length,), generator=generator).tolist() for length in lengths]


def milliseconds(run: Callable[[], Any], repeats: int = 5, warm_ups: int = 1) -> list[float]:
    """Wall times of a function, the device idle before and after each run."""
    times = []
    for index in range(warm_ups + repeats):
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        started = time.perf_counter()
        run()
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        if index >= warm_ups:
            times.append((time.perf_counter() - started) * 1e3)
    return times


def median(values: list[float]) -> float:
    """The median, to microseconds."""
    return round(statistics.median(values), 3)


def origin() -> dict[str, str]:
    """Versions and device of a result."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "liveroll": liveroll.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": device,
        "threads": str(torch.get_num_threads()),
    }


def keep(name: str, result: dict[str, Any], folder: Path | None = None) -> str:
    """Keep a result as JSON, with its origin; the JSON in one line."""
    result = {"benchmark": name, **result, "origin": origin()}
    target = (folder or RESULTS) / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    return json.dumps(result)


def report(name: str, result: dict[str, Any], folder: Path | None = None) -> None:
    """Keep a result as JSON and print it as the last line."""
    print(keep(name, result, folder))
