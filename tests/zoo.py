"""Tiny seeded random causal LMs of many architectures, and what `model.generate` makes of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

VOCAB_SIZE = 97
WINDOW = 8

_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_ALTERNATING = ["sliding_attention", "full_attention"]

# Model type and the settings that differ from _BASE. Only names that both transformers 4.57 and 5 take.
_SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 3,
            "sliding_window": WINDOW,
            "layer_types": [*_ALTERNATING, "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "opt": (
        "opt",
        {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "tie_word_embeddings": True},
    ),
    "gpt2": (
        "gpt2",
        {"n_inner": 48, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": True},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "olmo2": ("olmo2", {"num_hidden_layers": 3}),
    "glm4": ("glm4", {"head_dim": 16}),
    "granite": (
        "granite",
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2},
    ),
    "cohere2": (
        "cohere2",
        {
            "num_hidden_layers": 3,
            "sliding_window": WINDOW,
            "layer_types": [*_ALTERNATING, "sliding_attention"],
            "logit_scale": -3.0,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}

ARCHITECTURES = tuple(_SPECS)
WINDOWED = tuple(name for name, (_, settings) in _SPECS.items() if "sliding_window" in settings)

# Matrices are normal with this deviation: logits then have a deviation of about 3.5, so that a greedy response
# varies and the two most likely tokens are seldom within rounding of each other.
_STD = 0.6
# Where layer outputs are normalized the last token outweighs every layer and repeats itself. Smaller embeddings
# prevent it; in tied logits a larger final norm makes up for them, and a negative one opposes repetition.
_EMBEDDING_STD = {"gemma2": 0.1, "gemma3": 0.1, "cohere2": 0.2, "olmo2": 0.2}
_FINAL_NORM_SHIFT = {"gemma2": -7.0, "gemma3": -7.0}


def build(name: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Make a new model in eval mode, fp32, on the CPU; `settings` replace entries of its configuration."""
    model_type, own = _SPECS[name]
    config = AutoConfig.for_model(model_type, **{**_BASE, **own, **settings})
    # transformers 4.57 gives Gemma 2 scaled_dot_product_attention, which drops the soft-capping without a word.
    attention = "eager" if model_type == "gemma2" else None
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    _draw_weights(model, name, torch.Generator().manual_seed(seed))
    # Glm4Config replaces None by the ids of the released checkpoints.
    model.config.eos_token_id = None
    model.generation_config = GenerationConfig()
    return model.eval()


@cache
def shared(name: str) -> PreTrainedModel:
    """`build(name)`, made once for the whole test run; only for tests that leave it as it is."""
    return build(name)


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, name: str, generator: torch.Generator) -> None:
    embedding = model.get_input_embeddings().weight
    for path, parameter in model.named_parameters():
        if path.endswith("sinks"):
            # As large as the largest attention scores, or they would not show.
            parameter.normal_(10.0, 5.0, generator=generator)
        elif path.endswith("bias"):
            parameter.normal_(0.0, 0.2, generator=generator)
        elif parameter.ndim == 1:
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.2, generator=generator))
            if path.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.add_(1.0)
            if path == "model.norm.weight":
                parameter.add_(_FINAL_NORM_SHIFT.get(name, 0.0))
        else:
            std = _EMBEDDING_STD.get(name, _STD) if parameter is embedding else _STD
            parameter.normal_(0.0, std, generator=generator)


@contextmanager
def with_eos(model: PreTrainedModel, eos: int | list[int] | None, pad: int | None = None) -> Iterator[PreTrainedModel]:
    """Give the model's generation configuration these ids inside the block."""
    before = model.generation_config
    model.generation_config = copy.deepcopy(before)
    model.generation_config.eos_token_id = eos
    model.generation_config.pad_token_id = pad
    try:
        yield model
    finally:
        model.generation_config = before


def ragged_prompts(vocab_size: int, seed: int, lengths: Sequence[int] = (1, 3, 7, 12, 20)) -> list[list[int]]:
    """Draw one random prompt of each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay prompts out as `input_ids` and `attention_mask`, both `[B, T]` int64, padded on the left."""
    width = max(map(len, prompts))
    ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def reference(model: PreTrainedModel, prompt_ids: Sequence[int], **kwargs: Any) -> list[int]:
    """Give the response of `model.generate(**kwargs)` to one prompt, its first eos included."""
    return reference_batch(model, [prompt_ids], **kwargs)[0]


def reference_batch(model: PreTrainedModel, prompts: Sequence[Sequence[int]], **kwargs: Any) -> list[list[int]]:
    """Give the responses of `model.generate(**kwargs)` to left-padded prompts, each cut after its first eos.

    With a repetition penalty transformers 4.57 also counts the padding as history, so its rows may then differ
    from `reference`.
    """
    eos, pad = (kwargs.get(key, getattr(model.generation_config, key)) for key in ("eos_token_id", "pad_token_id"))
    stops = {eos} if isinstance(eos, int) else set(eos or ())
    ids, mask = left_pad(prompts, pad_id=0 if pad is None else pad)
    rows = model.generate(ids, attention_mask=mask, **kwargs)[:, ids.shape[1] :].tolist()
    ends = [next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def early_eos(model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """Find a token that, taken as eos, ends some greedy responses in their first half and leaves others whole.

    Of several, the one that gives the most different lengths is taken, then the smallest.

    Raises:
        ValueError: no token does so; other prompts or more tokens are needed.
    """
    with with_eos(model, None):
        rows = reference_batch(model, prompts, max_new_tokens=max_new_tokens)
    best, most = None, 0
    for token in sorted({token for row in rows for token in row}):
        lengths = {row.index(token) + 1 if token in row else max_new_tokens + 1 for row in rows}
        mixed = min(lengths) <= max_new_tokens // 2 and max(lengths) > max_new_tokens
        if mixed and len(lengths) > most:
            best, most = token, len(lengths)
    if best is None:
        raise ValueError("no token ends some responses early and leaves others: give other prompts")
    return best
