import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, WatermarkingConfig

from liveroll.errors import UnsupportedGenerationError
from liveroll.model.generation import resolve_sampling
from liveroll.model.switches import NEUTRAL
from liveroll.model.versions import default_generation_fields
from liveroll.sampling_config import SamplingConfig

VOCAB, WIDTH = 64, 6
UNSUPPORTED = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": ["x"],
    "force_words_ids": [[3]],
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "use_mtp": True,
    "is_assistant": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.2,
    "bad_words_ids": [[3], [4, 5]],
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 3,
    "exponential_decay_length_penalty": (4, 1.1),
    "sequence_bias": [[[3], 2.0], [[4, 5], 1.0]],
    "guidance_scale": 1.5,
    "watermarking_config": WatermarkingConfig(),
    "typical_p": 0.9,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "top_h": 0.5,
    "renormalize_logits": True,
    "remove_invalid_values": True,
    "token_healing": True,
    "max_time": 1.0,
    "stop_strings": ["x"],
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "return_dict_in_generate": True,
    "use_cache": False,
    "cache_implementation": "quantized",
    "my_switch": True,
}
HARMLESS = {
    "early_stopping": True,
    "length_penalty": 2.0,
    "num_assistant_tokens": 5,
    "bos_token_id": 1,
    "cache_implementation": "static",
    "prefill_chunk_size": 4,
    "disable_compile": True,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "my_switch": False,
    "_my_switch": True,
}


class Preparing(LlamaForCausalLM):
    """A model with a preparer of its own: `change` is applied to what transformers prepares."""

    change, calls = None, 0

    def _prepare_generation_config(self, *args, **kwargs):
        self.calls += 1
        config, model_kwargs = super()._prepare_generation_config(*args, **kwargs)
        if self.change is not None:
            self.change(config, model_kwargs)
        return config, model_kwargs


def tiny_llama(change=None, **overrides):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Preparing(LlamaConfig(**sizes, vocab_size=VOCAB)).eval()
    for name, value in {"eos_token_id": 2, **overrides}.items():
        setattr(model.generation_config, name, value)
    model.change = change
    return model


def batch():
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * WIDTH])
    return torch.full((2, WIDTH), 7) * mask, mask


def resolve(model, tensors=None, **sampling):
    ids, mask = batch() if tensors is None else tensors
    inputs = {"prompt_width": WIDTH, "input_ids": ids, "attention_mask": mask, "vocab_size": VOCAB}
    return resolve_sampling(model, SamplingConfig(**sampling), **inputs)


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_an_unsupported_setting_is_refused_by_name(field):
    """Guards against a setting of a checkpoint being dropped in silence."""
    with pytest.raises(UnsupportedGenerationError, match=rf'{field}=.*unset it, or .*fallback="generate"'):
        resolve(tiny_llama(**{field: UNSUPPORTED[field]}))


def test_a_switch_set_by_the_preparer_is_refused():
    """Guards against only model.generation_config being looked at, and a tensor without a truth value."""

    def change(config, _):
        config.my_bias = torch.zeros(VOCAB)

    with pytest.raises(UnsupportedGenerationError, match="my_bias=tensor"):
        resolve(tiny_llama(change))


@pytest.mark.parametrize("field", HARMLESS)
def test_a_setting_without_effect_is_accepted(field):
    """Guards against a checkpoint refused for a setting that changes no token."""
    assert resolve(tiny_llama(**{field: HARMLESS[field]})) == resolve(tiny_llama())


def test_every_field_of_the_installed_version_is_in_the_table():
    """Guards against a field of a newer transformers that nobody has judged."""
    assert set(default_generation_fields()) <= set(NEUTRAL)


def test_a_multiplied_penalty_is_applied_once():
    """Guards against the preparer running twice (1.5 · 1.2 · 1.2), or its penalty being lost."""

    def change(config, _):
        config.repetition_penalty *= 1.2

    given, inherited = tiny_llama(change), tiny_llama(change, repetition_penalty=1.5)
    for model, sampling in (given, {"repetition_penalty": 1.5}), (inherited, {}):
        assert resolve(model, **sampling).repetition_penalty == pytest.approx(1.8)
        assert model.calls == 1


def edit_mask(_, model_kwargs):
    model_kwargs["attention_mask"][0, 2] = 1


def edit_prompt(_, model_kwargs):
    model_kwargs["input_ids"][0, 5] = 9


def replace_mask(_, model_kwargs):
    model_kwargs["attention_mask"] = torch.ones_like(model_kwargs["attention_mask"])


def drop_mask(_, model_kwargs):
    del model_kwargs["attention_mask"]


def add_argument(_, model_kwargs):
    model_kwargs["position_ids"] = torch.arange(WIDTH)[None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit_mask, "edited attention_mask in place"),
        (edit_prompt, "edited input_ids in place"),
        (replace_mask, "replaced attention_mask"),
        (drop_mask, "dropped attention_mask"),
        (add_argument, "added position_ids"),
    ],
)
def test_a_preparer_may_not_change_the_batch(change, message):
    """Guards against generate running another batch than the engine, or the caller's being edited."""
    tensors = batch()
    with pytest.raises(UnsupportedGenerationError, match=message):
        resolve(tiny_llama(change), tensors)
    assert all(torch.equal(given, fresh) for given, fresh in zip(tensors, batch(), strict=True))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_new_tokens", 3), ("min_new_tokens", 3), ("do_sample", False), ("temperature", 0.9)],
        *[("top_k", 4), ("top_p", 0.4), ("min_p", 0.4), ("eos_token_id", [3, 4]), ("num_return_sequences", 4)],
    ],
)
def test_a_preparer_may_not_change_what_was_asked_for(field, value):
    """Guards against the routes differing: generate would honour the change, and the engine the request."""
    asked = {"max_new_tokens": 9, "min_new_tokens": 1, "n": 2, "temperature": 0.5, "stop_token_ids": (3,)}
    filters = {"top_k": 9, "top_p": 0.5, "min_p": 0.1}

    def change(config, _):
        setattr(config, field, value)

    with pytest.raises(UnsupportedGenerationError, match=f"changed {field} from the requested"):
        resolve(tiny_llama(change), **asked, **filters)


def test_a_preparer_may_not_append_a_stop_token():
    """Guards against the comparison being made with the very list that was edited."""
    with pytest.raises(UnsupportedGenerationError, match="changed eos_token_id"):
        resolve(tiny_llama(lambda config, _: config.eos_token_id.append(5)), stop_token_ids=(3,))


@pytest.mark.parametrize("own", [None, 1])
def test_a_preparer_may_not_change_pad(own):
    """Guards against finished rows being padded with another token than the engine's."""
    with pytest.raises(UnsupportedGenerationError, match="changed pad_token_id"):
        resolve(tiny_llama(lambda config, _: setattr(config, "pad_token_id", 5), pad_token_id=own))


def test_a_preparer_may_fill_in_what_generate_would():
    """Guards against refusing a preparer that sets PAD to EOS, or decides what the request leaves open."""

    def change(config, _):
        config.pad_token_id, config.do_sample, config.temperature = 2, True, 0.3

    resolved = resolve(tiny_llama(change))
    assert (resolved.pad_token_id, resolved.do_sample, resolved.temperature) == (2, True, 0.3)


@pytest.mark.parametrize("fails", [False, True])
def test_the_models_own_configuration_is_left_as_found(fails):
    """Guards against a preparer's edits of model.generation_config outliving the call."""

    def change(*_):
        model.generation_config.temperature = 0.1
        model.generation_config.mine = True
        if fails:
            raise KeyError

    model = tiny_llama(change, cache_implementation="hybrid")
    own, before = model.generation_config, copy.deepcopy(vars(model.generation_config))
    if fails:
        with pytest.raises(KeyError):
            resolve(model)
    else:
        resolve(model)
    assert model.generation_config is own
    assert vars(own) == before


def test_a_field_nobody_has_judged_is_refused_once_it_is_set(monkeypatch):
    """Guards against a newer transformers: its new fields must pass at their defaults, and only there."""
    monkeypatch.delitem(NEUTRAL, "num_assistant_tokens")
    resolve(tiny_llama())
    with pytest.raises(UnsupportedGenerationError, match="num_assistant_tokens=5 is not a setting the engine knows"):
        resolve(tiny_llama(num_assistant_tokens=5))
