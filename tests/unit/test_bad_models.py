"""Models that cannot be rolled out exactly are refused with the reason, and left as found."""

from __future__ import annotations

import pytest
import torch
import transformers
import zoo
from snapshots import ForwardCounter, left_as_found
from torch import nn

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig, UnsupportedModelError

RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GREEDY = SamplingConfig(max_new_tokens=4)
PROMPTS = [[1, 2, 3], [4]]


def new(name, config, **settings):
    return getattr(transformers, name)(getattr(transformers, config)(**settings)).eval()


def llama(**settings):
    return new("LlamaForCausalLM", "LlamaConfig", **SIZES, intermediate_size=32, **settings)


def rope(kind):
    scaling = {"rope_type": kind, "factor": 2.0}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    if RELEASE >= (5, 0):
        scaling["rope_theta"] = 10000.0
    return llama(rope_scaling=scaling, max_position_embeddings=128)


def int8():
    model = llama()
    weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(weight.to(torch.int8), requires_grad=False)
    return model


def declared_quantised():
    model = llama()
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return model


def on_meta():
    with torch.device("meta"):
        return llama()


def half_on_meta():
    model = llama()
    model.lm_head.to("meta")
    return model


def vision():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    eyes = transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8, projection_dim=16)
    text = transformers.LlamaConfig(**SIZES, intermediate_size=32)
    return new("LlavaForConditionalGeneration", "LlavaConfig", vision_config=eyes, text_config=text)


def linear_attention():
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "linear_value_head_dim": 8}
    layers = {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16}
    return new("Qwen3NextForCausalLM", "Qwen3NextConfig", **SIZES, **experts, **linear, **heads, **layers)


def bart_decoder():
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32}
    return new("BartForCausalLM", "BartConfig", vocab_size=97, **sizes, is_decoder=True, is_encoder_decoder=False)


def sizes_of_bloom():
    return {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4}


REFUSED = {
    "encoder-decoder": (
        lambda: new("T5ForConditionalGeneration", "T5Config", vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1),
        "encoder-decoder",
    ),
    "no head": (lambda: new("LlamaModel", "LlamaConfig", **SIZES, intermediate_size=32), "no language-model head"),
    "a classifier": (
        lambda: new("LlamaForSequenceClassification", "LlamaConfig", **SIZES, intermediate_size=32),
        "no language-model head",
    ),
    "an encoder": (
        lambda: new("BertForMaskedLM", "BertConfig", **SIZES, intermediate_size=32),
        "no language-model head",
    ),
    "vision": (vision, "images or audio; pass its text model alone"),
    "int8 weights": (int8, "quantised; load it in fp32, fp16 or bf16"),
    "a quantisation": (declared_quantised, "quantised; load it in fp32, fp16 or bf16"),
    "no values": (on_meta, "meta device"),
    "few values": (half_on_meta, "meta device"),
    "dynamic rope": (lambda: rope("dynamic"), "rotary embedding .* longest row"),
    "longrope": (lambda: rope("longrope"), "rotary embedding .* longest row"),
    "linear attention": (linear_attention, "neither full nor sliding attention"),
    "a recurrent model": (
        lambda: new(
            "MambaForCausalLM", "MambaConfig", vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4
        ),
        "neither full nor sliding attention|position_ids",
    ),
    "ALiBi": (lambda: new("BloomForCausalLM", "BloomConfig", **sizes_of_bloom()), "position_ids"),
    "positions of its own": (bart_decoder, "position_ids"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_when_the_engine_is_made(kind):
    """Guards against a model that would generate something else than `model.generate`, or fail in mid-rollout."""
    make, reason = REFUSED[kind]
    model = make()
    with (
        ForwardCounter(model) as forwards,
        pytest.raises(UnsupportedModelError, match=f"{type(model).__name__}.*{reason}"),
    ):
        RolloutEngine(model)
    assert forwards.count == 0


@pytest.mark.parametrize("kind", ["encoder-decoder", "no head", "no values"])
def test_refused_with_a_fallback_too(kind):
    """Guards against a fallback to a `generate` that does not exist or does something else."""
    make, reason = REFUSED[kind]
    with pytest.raises(UnsupportedModelError, match=reason):
        RolloutEngine(make(), config=RolloutConfig(fallback="generate"))


class OtherAttention(nn.Module):
    """Attention that ignores transformers' interface."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states, **kwargs):
        return self.inner.o_proj(self.inner.q_proj(hidden_states)), None


def test_a_layer_that_attends_by_other_means():
    """Guards against a custom layer whose keys never reach the pages."""
    model = llama()
    model.model.layers[1].self_attn = OtherAttention(model.model.layers[1].self_attn)
    with left_as_found(model), pytest.raises(UnsupportedModelError, match=r"layers \[1\] do not attend"):
        RolloutEngine(model).generate(PROMPTS, GREEDY)


def test_a_layer_that_wants_a_mask_of_its_own():
    """Guards against an error from inside the model, which no fallback goes round, for attention in its own code."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = new("FalconForCausalLM", "FalconConfig", **sizes, eos_token_id=None, alibi=False)
    with left_as_found(model), pytest.raises(UnsupportedModelError, match=r"Falcon.*layers \[0.*\] do not attend"):
        RolloutEngine(model).generate(PROMPTS, GREEDY)
    batch = RolloutEngine(model, config=RolloutConfig(fallback="generate")).generate(PROMPTS, GREEDY)
    assert [list(completion.token_ids) for completion in batch.completions] == [
        zoo.reference(model, prompt, max_new_tokens=4, do_sample=False) for prompt in PROMPTS
    ]


class KeysOfOthers(nn.Module):
    """Attention over keys that are not the ones it stored."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states, **kwargs):
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        update = cache.update
        cache.update = lambda key, value, *args, **more: tuple(2 * part for part in update(key, value, *args, **more))
        try:
            return self.inner(hidden_states, **kwargs)
        finally:
            del cache.update


def test_a_layer_that_changes_its_keys_after_storing_them():
    """Guards against decode steps attending to other keys than the prefill did."""
    model = llama()
    model.model.layers[1].self_attn = KeysOfOthers(model.model.layers[1].self_attn)
    with (
        left_as_found(model),
        pytest.raises(UnsupportedModelError, match="layer 1 attends to keys that it did not store"),
    ):
        RolloutEngine(model).generate(PROMPTS, GREEDY)


@pytest.mark.skipif(RELEASE >= (5, 0), reason="transformers 5 refuses sdpa for this model itself")
def test_a_soft_cap_that_sdpa_drops():
    """Guards against rolling out with the soft-cap a model that trains without it; found whenever it is set."""
    model = zoo.build("gemma2")
    rollouts = RolloutEngine(model)
    expected = rollouts.generate(PROMPTS, GREEDY).completions
    model.set_attn_implementation("sdpa")
    for engine in (rollouts, RolloutEngine(model)):
        with (
            left_as_found(model),
            pytest.raises(UnsupportedModelError, match=r"soft-capped.*attn_implementation='eager'"),
        ):
            engine.generate(PROMPTS, GREEDY)
    model.set_attn_implementation("eager")
    assert rollouts.generate(PROMPTS, GREEDY).completions == expected
