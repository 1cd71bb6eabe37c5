"""`fallback="generate"`: what the engine does not do goes to `model.generate`, whole and with the reason."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
import transformers
import zoo
from snapshots import ForwardCounter, Trap, left_as_found, raising
from texts import character_tokenizer

from liveroll import (
    ConfigError,
    PromptError,
    RolloutConfig,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
    UnsupportedGenerationError,
    UnsupportedModelError,
)
from liveroll.scheduling.request import Request

FALLBACK = RolloutConfig(fallback="generate")
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=5, lengths=(2, 5, 9))
GREEDY = SamplingConfig(max_new_tokens=8)


def bloom():
    torch.manual_seed(0)
    sizes = {"vocab_size": zoo.VOCAB_SIZE, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    return without_eos(transformers.BloomForCausalLM(transformers.BloomConfig(**sizes)))


def mamba():
    torch.manual_seed(0)
    sizes = {"vocab_size": zoo.VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    return without_eos(transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)))


def without_eos(model):
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model.eval()


def asking(**settings):
    """A model whose generation configuration asks for something the engine does not do."""
    model = zoo.build("llama")
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


def expected(model, prompts=PROMPTS, **kwargs):
    """The whole batch of `model.generate`, prompts included."""
    ids, mask = zoo.left_pad(prompts, pad_id=model.generation_config.pad_token_id or 0)
    return model.generate(ids, attention_mask=mask, **{"max_new_tokens": 8, **kwargs})


MODELS = {"bloom": (bloom, "position_ids"), "mamba": (mamba, "position_ids|neither full nor sliding")}
SETTINGS = {
    "ngrams": {"no_repeat_ngram_size": 2},
    "beams": {"num_beams": 2},
    "bad words": {"bad_words_ids": [[7], [8, 9]]},
    "eos decay": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 5, "pad_token_id": 0},
    "dict output": {"output_scores": True, "return_dict_in_generate": True},
}


@pytest.mark.parametrize("name", MODELS)
def test_an_unsupported_model(name):
    """Guards against a fallback that pads, masks or cuts otherwise than `generate`, or hides that it was taken."""
    make, reason = MODELS[name]
    model = make()
    with pytest.raises(UnsupportedModelError, match=reason):
        RolloutEngine(model)
    rollouts = RolloutEngine(model, config=FALLBACK)
    with left_as_found(model):
        batch = rollouts.generate(PROMPTS, GREEDY)
    assert batch.input_ids.equal(expected(model))
    assert batch.response_start_idx == 9
    assert batch.stats.route == "generate"
    assert type(model).__name__ in batch.stats.fallback_reason
    with pytest.raises(UnsupportedModelError, match=reason):
        list(rollouts.stream(PROMPTS, GREEDY))


@pytest.mark.parametrize("name", SETTINGS)
def test_unsupported_settings(name):
    """Guards against a setting of the checkpoint that the fallback loses after the engine refused it."""
    model = asking(**SETTINGS[name])
    field = next(iter(SETTINGS[name]))
    with ForwardCounter(model) as forwards, pytest.raises(UnsupportedGenerationError, match=f"{field}="):
        RolloutEngine(model).generate(PROMPTS, GREEDY)
    assert forwards.count == 0
    with left_as_found(model):
        batch = RolloutEngine(model, config=FALLBACK).generate(PROMPTS, GREEDY)
    output = expected(model)
    assert batch.input_ids.equal(output if isinstance(output, torch.Tensor) else output.sequences)
    assert (batch.stats.route, batch.stats.fallback_reason[:18]) == ("generate", "generation_config.")
    assert field in batch.stats.fallback_reason
    assert batch.stats.new_tokens == sum(len(completion.token_ids) for completion in batch.completions)


def test_what_is_supported_does_not_fall_back():
    """Guards against a permission taken for an order."""
    batch = RolloutEngine(zoo.build("llama"), config=FALLBACK).generate(PROMPTS, GREEDY)
    assert (batch.stats.route, batch.stats.fallback_reason) == ("packed", None)


def test_attention_dropout_falls_back():
    """Guards against a refusal found in the first forward only, after the rollout has begun."""
    model = zoo.build("gpt2", attn_pdrop=0.1)
    config = dataclasses.replace(FALLBACK, training_mode=True)
    with left_as_found(model):
        batch = RolloutEngine(model, config=config).generate(PROMPTS, GREEDY)
    assert "attention dropout" in batch.stats.fallback_reason
    assert [len(completion.token_ids) for completion in batch.completions] == [8, 8, 8]


def test_rows_end_where_generate_ended_them():
    """Guards against PAD behind an eos counted as tokens, or an eos counted as PAD where they are one."""
    model = asking(no_repeat_ngram_size=2)
    rows = expected(model)[:, 9:].tolist()
    stop = rows[0][3]
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = stop
    batch = RolloutEngine(model, config=FALLBACK).generate(PROMPTS, GREEDY)
    assert batch.input_ids.equal(expected(model))
    for completion, row in zip(batch.completions, rows, strict=True):
        ended = stop in row
        assert list(completion.token_ids) == (row[: row.index(stop) + 1] if ended else row)
        assert (completion.finish_reason, completion.stop) == (("stop", stop) if ended else ("length", None))


def test_samples_and_seeds():
    """Guards against samples of one prompt given to another, or a seed without effect."""
    model = asking(no_repeat_ngram_size=2)
    sampling = SamplingConfig(max_new_tokens=8, n=2, temperature=1.0, seed=7)
    with left_as_found(model):
        batch = RolloutEngine(model, config=FALLBACK).generate(PROMPTS, sampling)
    torch.manual_seed(7)
    assert batch.input_ids.equal(expected(model, do_sample=True, num_return_sequences=2, temperature=1.0))
    assert [(c.prompt_index, c.sample_index) for c in batch.completions] == [(i, s) for i in range(3) for s in range(2)]
    unseeded = dataclasses.replace(sampling, seed=None)
    engines = [RolloutEngine(model, config=FALLBACK) for _ in range(2)]
    first, second = ([e.generate(PROMPTS, unseeded).completions for _ in range(2)] for e in engines)
    assert first == second
    assert first[0] != first[1]


def test_seeds_are_of_one_device(monkeypatch):
    """Guards against a call that seeds the generators of GPUs that the model is not on."""
    rollouts, seeded = RolloutEngine(mamba(), config=FALLBACK), []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    rollouts.generate(PROMPTS, GREEDY)
    assert not seeded
    torch.manual_seed(0)
    assert seeded == [0]


def test_greedy_samples_are_copies():
    """Guards against `generate` refusing several greedy samples, which the engine gives."""
    model = asking(no_repeat_ngram_size=2)
    batch = RolloutEngine(model, config=FALLBACK).generate(PROMPTS, SamplingConfig(max_new_tokens=8, n=2))
    assert batch.input_ids.equal(expected(model).repeat_interleave(2, dim=0))
    beams = asking(num_beams=2)
    batch = RolloutEngine(beams, config=FALLBACK).generate(PROMPTS, SamplingConfig(max_new_tokens=8, n=2))
    assert batch.input_ids.equal(expected(beams, num_return_sequences=2))


def test_a_setting_for_each_prompt():
    """Guards against responses out of order where prompts with equal settings run together."""
    model = asking(no_repeat_ngram_size=2)
    short, long = SamplingConfig(max_new_tokens=2), SamplingConfig(max_new_tokens=6)
    batch = RolloutEngine(model, config=FALLBACK).generate(PROMPTS, [long, short, long])
    rows = [zoo.reference(model, prompt, max_new_tokens=6) for prompt in PROMPTS]
    assert [list(c.token_ids) for c in batch.completions] == [rows[0], rows[1][:2], rows[2]]


def test_a_padded_request():
    """Guards against a given batch laid out anew."""
    model, (ids, mask) = bloom(), zoo.left_pad(PROMPTS, pad_id=3)
    batch = RolloutEngine(model, config=FALLBACK).generate(RolloutRequest(ids, mask), GREEDY)
    assert batch.input_ids[:, :9].equal(ids)
    assert batch.input_ids.equal(model.generate(ids, attention_mask=mask, max_new_tokens=8))


@pytest.mark.parametrize("inherited", [False, True])
def test_stop_strings(inherited):
    """Guards against a stop string that the response goes on behind, in PAD or in tokens."""
    tokenizer = character_tokenizer()
    model = asking(no_repeat_ngram_size=2)
    text = tokenizer.decode(zoo.reference(model, PROMPTS[1], max_new_tokens=8))
    stop = text[2:4]
    if inherited:
        model.generation_config.stop_strings = stop
    sampling = SamplingConfig(max_new_tokens=8, stop=() if inherited else stop)
    batch = RolloutEngine(model, tokenizer, FALLBACK).generate(PROMPTS, sampling)
    assert batch.completions[1].text == text[:4]
    assert (batch.completions[1].finish_reason, batch.completions[1].stop) == ("stop", stop)
    with ForwardCounter(model) as forwards, pytest.raises(ConfigError, match=r"stop .* no tokenizer"):
        RolloutEngine(model, config=FALLBACK).generate(PROMPTS, sampling)
    assert forwards.count == 0


def test_a_prompt_too_long():
    """Guards against an index outside the position embeddings, which on a GPU ends the process."""
    model = zoo.build("gpt2")
    model.generation_config.no_repeat_ngram_size = 2
    with (
        ForwardCounter(model) as forwards,
        pytest.raises(PromptError, match=r"prompt 1 .*max_position_embeddings is 512"),
    ):
        RolloutEngine(model, config=FALLBACK).generate([[1], [1] * 505], GREEDY)
    assert forwards.count == 0


def test_an_error_inside_the_fallback():
    """Guards against an engine or a model that the fallback leaves in rollout mode."""
    model = bloom().train()
    rollouts = RolloutEngine(model, config=FALLBACK)
    trap = Trap(model.transformer.h[0], 3, raising(KeyboardInterrupt()))
    with left_as_found(model), pytest.raises(KeyboardInterrupt):
        rollouts.generate(PROMPTS, GREEDY)
    trap.remove()
    with left_as_found(model):
        batch = rollouts.generate(PROMPTS, GREEDY)
    assert batch.input_ids.equal(expected(model.eval()))


def requests_alive():
    gc.collect()
    return {id(held): held for held in gc.get_objects() if type(held) is Request}


def test_a_refusal_told_again_and_again():
    """Guards against an error that keeps the engine, and the prompts and responses of every call it was raised in."""
    others = requests_alive()
    rollouts = RolloutEngine(mamba(), config=FALLBACK)
    for _ in range(3):
        rollouts.generate(PROMPTS, GREEDY)
    assert requests_alive().keys() <= others.keys()
    gc.disable()
    try:
        engine = weakref.ref(rollouts)
        del rollouts
        assert engine() is None
    finally:
        gc.enable()
