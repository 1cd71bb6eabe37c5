import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from liveroll.model.generate_arguments import generate_kwargs, to_generation_config
from liveroll.model.generation import resolve_sampling
from liveroll.model.versions import prepare_generation_config, prepared_for_generate
from liveroll.sampling_config import SamplingConfig

VOCAB, WIDTH = 64, 6


class PenalisingLlama(LlamaForCausalLM):
    """Multiplies the repetition penalty each time it prepares."""

    calls = 0

    def _prepare_generation_config(self, *args, **kwargs):
        self.calls += 1
        config, model_kwargs = super()._prepare_generation_config(*args, **kwargs)
        config.repetition_penalty *= 1.5
        return config, model_kwargs


def tiny_llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = PenalisingLlama(LlamaConfig(**sizes, vocab_size=VOCAB)).eval()
    model.generation_config.update(eos_token_id=2, max_new_tokens=7)
    return model


def batch():
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * WIDTH])
    return torch.randint(3, VOCAB, (2, WIDTH), generator=torch.Generator().manual_seed(1)) * mask, mask


def resolve(model, sampling):
    ids, mask = batch()
    inputs = {"prompt_width": WIDTH, "input_ids": ids, "attention_mask": mask, "vocab_size": VOCAB}
    return resolve_sampling(model, sampling, **inputs)


@pytest.mark.parametrize("sampling", [{}, {"repetition_penalty": 2}, {"stop_token_ids": ()}, {"min_new_tokens": 5}])
def test_a_prepared_config_is_not_prepared_again(sampling):
    """Guards against a preparer's change applied twice on the ordinary route, or arguments winning over it."""
    model, sampling, (ids, mask) = tiny_llama(), SamplingConfig(**sampling), batch()
    expected = model.generate(ids, attention_mask=mask, **generate_kwargs(sampling))
    for config in (
        prepare_generation_config(model, generate_kwargs(sampling)).config,
        to_generation_config(resolve(model, sampling)),
    ):
        before, calls = copy.deepcopy(config), model.calls
        with prepared_for_generate(model, config):
            tokens = model.generate(ids, attention_mask=mask, max_new_tokens=1)
        assert torch.equal(tokens, expected)
        assert (config, model.calls) == (before, calls)


def test_greedy_samples_are_copies():
    """Guards against a prepared request for several greedy samples failing where transformers refuses one."""
    model, (ids, mask) = tiny_llama(), batch()
    config = to_generation_config(resolve(model, SamplingConfig(n=2, temperature=0)))
    with prepared_for_generate(model, config):
        tokens = model.generate(ids, attention_mask=mask)
    expected = model.generate(ids, attention_mask=mask, **generate_kwargs(SamplingConfig(temperature=0)))
    assert torch.equal(tokens, expected.repeat_interleave(2, 0))


@pytest.mark.parametrize("shadowed", [False, True])
def test_an_earlier_shadow_of_the_preparer_comes_back(shadowed):
    """Guards against an instance attribute, or the class's method, not being restored after an error."""
    model = tiny_llama()
    mine = model._prepare_generation_config
    if shadowed:
        model._prepare_generation_config = mine
    with pytest.raises(KeyError), prepared_for_generate(model, model.generation_config):
        raise KeyError
    assert vars(model).get("_prepare_generation_config") is (mine if shadowed else None)


@pytest.mark.parametrize(
    ("sampling", "kwargs"),
    [
        ({}, {}),
        ({"max_new_tokens": 9, "min_new_tokens": 1}, {"max_new_tokens": 9, "min_new_tokens": 1}),
        ({"top_k": 0, "top_p": 0.5, "min_p": 0.0}, {"top_k": 0, "top_p": 0.5, "min_p": 0.0}),
        ({"temperature": 0}, {"do_sample": False}),
        (
            {"temperature": 1, "repetition_penalty": 2},
            {"do_sample": True, "temperature": 1.0, "repetition_penalty": 2.0},
        ),
        ({"stop_token_ids": (4,), "stop": "a"}, {"eos_token_id": [4], "stop_strings": ["a"]}),
        ({"stop_token_ids": ()}, {"eos_token_id": None}),
    ],
)
def test_generate_kwargs(sampling, kwargs):
    """Guards against a field lost on the way to the fallback, or a whole number refused there."""
    result = generate_kwargs(SamplingConfig(**sampling))
    assert result == {**kwargs, "num_return_sequences": 1}
    assert {name: type(value) for name, value in result.items() if name in kwargs} == {
        name: type(value) for name, value in kwargs.items()
    }
    assert generate_kwargs(SamplingConfig(n=3))["num_return_sequences"] == 3
