"""What a call returns: tensors, completions, log-probabilities, and the settings that ran."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import zoo

from liveroll import RolloutConfig, RolloutEngine, RolloutRequest, SamplingConfig

ROUTES = ("packed", "equal_width", "per_prompt", "ordinary")
MODEL = zoo.build("llama")
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=5)
BUDGET = 10


def engine(route="packed", model=MODEL, **settings):
    return RolloutEngine(model, config=RolloutConfig(prefill_route=route, page_size=4, max_slots=3, **settings))


def tokens(batch):
    return [list(completion.token_ids) for completion in batch.completions]


def references(prompts=PROMPTS, **kwargs):
    return [zoo.reference(MODEL, prompt, **{"max_new_tokens": BUDGET, **kwargs}) for prompt in prompts]


@pytest.mark.parametrize("route", ROUTES)
def test_tensors(route):
    """Guards against rows out of order, padding on the wrong side, or a mask that counts it."""
    stop = zoo.early_eos(MODEL, PROMPTS, BUDGET)
    with zoo.with_eos(MODEL, stop, pad=0):
        batch = engine(route).generate(PROMPTS, SamplingConfig(max_new_tokens=BUDGET, n=2, temperature=1.0, seed=1))
    widest, longest = max(map(len, PROMPTS)), max(len(completion.token_ids) for completion in batch.completions)
    assert len(batch) == len(batch.completions) == 10
    assert batch.input_ids.shape == batch.attention_mask.shape == (10, widest + longest)
    assert batch.input_ids.dtype == batch.attention_mask.dtype == torch.int64
    assert batch.response_start_idx == widest
    for row, completion in enumerate(batch.completions):
        assert (completion.prompt_index, completion.sample_index) == divmod(row, 2)
        prompt, response = PROMPTS[row // 2], list(completion.token_ids)
        left, right = widest - len(prompt), longest - len(response)
        assert batch.input_ids[row].tolist() == [0] * left + prompt + response + [0] * right
        assert batch.attention_mask[row].tolist() == [0] * left + [1] * (len(prompt) + len(response)) + [0] * right
        assert completion.text is None
    assert len({len(completion.token_ids) for completion in batch.completions}) > 1


@pytest.mark.parametrize("route", ROUTES)
def test_a_given_batch_comes_back_as_it_was(route):
    """Guards against a padded request whose padding, or columns that are all padding, are made anew."""
    ids, mask = zoo.left_pad(PROMPTS, pad_id=9)
    ids, mask = torch.cat([ids[:, :1] * 0 + 5, ids], 1), torch.cat([mask[:, :1] * 0, mask], 1)
    for cast in (torch.bool, torch.bfloat16, torch.int32):
        batch = engine(route).generate(RolloutRequest(ids, mask.to(cast)), SamplingConfig(max_new_tokens=BUDGET))
        assert batch.input_ids[:, : ids.shape[1]].equal(ids)
        assert batch.attention_mask[:, : ids.shape[1]].equal(mask)
        assert batch.response_start_idx == ids.shape[1]
        assert tokens(batch) == references()


@pytest.mark.parametrize("route", ROUTES)
def test_log_probabilities(route):
    """Guards against log-probabilities of another token, another prompt or another distribution."""
    batch = engine(route).generate(PROMPTS, SamplingConfig(max_new_tokens=BUDGET, temperature=0.7, seed=3))
    for completion, prompt in zip(batch.completions, PROMPTS, strict=True):
        with torch.no_grad():
            logits = MODEL(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("route", ROUTES)
def test_log_probabilities_for_those_who_asked(route):
    """Guards against numbers where None was promised, and the other way round."""
    without, given = (SamplingConfig(max_new_tokens=3, logprobs=asked) for asked in (False, True))
    batch = engine(route).generate(PROMPTS[:3], [without, given, without])
    assert [completion.logprobs is None for completion in batch.completions] == [True, False, True]
    assert len(batch.completions[1].logprobs) == 3


INHERITED = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 50,
    "top_p": 0.8,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "eos_token_id": [5, 7],
    "pad_token_id": 3,
    "max_new_tokens": 6,
    "min_new_tokens": 2,
    "sequence_bias": [[[4], 2.5], [[9], -1.0]],
    "suppress_tokens": [11],
    "bad_words_ids": [[12], [5]],  # 5 is a stop token, which transformers does not forbid
    "begin_suppress_tokens": [13],
}


@pytest.mark.parametrize("route", ROUTES)
def test_settings_that_ran(route):
    """Guards against a result that reports what was asked for instead of what ran."""
    model = zoo.build("llama")
    model.generation_config.update(**INHERITED)
    plain = {"max_new_tokens": 4, "temperature": 0, "n": 2, "stop_token_ids": (), "seed": 9, "logprobs": False}
    new = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {8: 1, 2: 0.5}, "forbidden_tokens": (3,)}
    told = {"raw_logprobs": True, "top_logprobs": 3, "kept_tokens": 5}
    given = SamplingConfig(**plain, **new, **told)
    batch = engine(route, model).generate(PROMPTS[:2], [SamplingConfig(), given])
    inherited, overridden = map(dataclasses.asdict, batch.sampling)
    own = {**INHERITED, "stop_token_ids": (5, 7), "stop": (), "n": 1, "seed": None, "logprobs": True}
    for name in ("eos_token_id", "sequence_bias", "suppress_tokens", "bad_words_ids", "begin_suppress_tokens"):
        del own[name]
    own |= {"logit_bias": ((4, 2.5), (9, -1.0)), "forbidden_tokens": (11, 12), "first_forbidden_tokens": (13,)}
    own |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "raw_logprobs": False}
    own |= {"top_logprobs": 0, "kept_tokens": 0}
    own["include_stop"] = True
    assert inherited == own
    neutral = {"do_sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    asked = {"max_new_tokens": 4, "n": 2, "stop_token_ids": (), "seed": 9, "logprobs": False}
    assert overridden == {**own, **neutral, **asked, **new, **told, "logit_bias": ((2, 0.5), (8, 1.0))}
    assert [len(completion.token_ids) for completion in batch.completions][1:] == [4, 4]
    assert batch.input_ids[0, : batch.response_start_idx - len(PROMPTS[0])].eq(3).all()


@pytest.mark.parametrize("route", ROUTES)
def test_inherited_settings_generate_what_generate_does(route):
    """Guards against a checkpoint's penalty or lengths being reported and not run."""
    model = zoo.build("llama")
    own = {"repetition_penalty": 1.3, "max_new_tokens": 7, "min_new_tokens": 3, "eos_token_id": 8, "pad_token_id": 0}
    model.generation_config.update(**own)
    assert tokens(engine(route, model).generate(PROMPTS)) == [zoo.reference(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("route", ROUTES)
def test_a_setting_for_each_prompt(route):
    """Guards against a budget, penalty or stop of one prompt reaching its neighbour."""
    rows = references()
    settings = [
        SamplingConfig(max_new_tokens=2),
        SamplingConfig(max_new_tokens=BUDGET, repetition_penalty=1.4),
        SamplingConfig(max_new_tokens=BUDGET, stop_token_ids=(rows[2][3],)),
        SamplingConfig(max_new_tokens=5, n=3),
        SamplingConfig(max_new_tokens=1, min_new_tokens=1),
    ]
    batch = engine(route).generate(PROMPTS, settings)
    penalised = zoo.reference(MODEL, PROMPTS[1], max_new_tokens=BUDGET, repetition_penalty=1.4)
    stopped = rows[2][: rows[2].index(rows[2][3]) + 1]
    assert tokens(batch) == [rows[0][:2], penalised, stopped, *[rows[3][:5]] * 3, rows[4][:1]]
    assert [c.prompt_index for c in batch.completions] == [0, 1, 2, 3, 3, 3, 4]
    assert [c.sample_index for c in batch.completions] == [0, 0, 0, 0, 1, 2, 0]
    assert [s.max_new_tokens for s in batch.sampling] == [2, BUDGET, BUDGET, 5, 1]


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_gives_what_generate_gives(route):
    """Guards against a completion that is given twice, never, or as another one."""
    sampling = SamplingConfig(max_new_tokens=BUDGET, n=3, temperature=1.0, stop_token_ids=(5, 6, 7))
    rollouts, twin = engine(route), engine(route)
    for _ in range(2):
        streamed = list(rollouts.stream(PROMPTS, sampling))
        whole = twin.generate(PROMPTS, sampling).completions
        order = [(completion.prompt_index, completion.sample_index) for completion in streamed]
        assert len(set(order)) == len(order) == 15
        streamed.sort(key=lambda completion: (completion.prompt_index, completion.sample_index))
        for one, other in zip(streamed, whole, strict=True):
            torch.testing.assert_close(one.logprobs, other.logprobs, atol=2e-3, rtol=0)
            assert dataclasses.replace(one, logprobs=None) == dataclasses.replace(other, logprobs=None)


@pytest.mark.parametrize("route", ROUTES)
def test_a_progress_bar(route, capsys):
    """Guards against a bar that changes the result, counts wrong, or is drawn where nobody asked."""
    plain = engine(route).generate(PROMPTS, SamplingConfig(max_new_tokens=3))
    assert "".join(capsys.readouterr()) == ""
    shown = engine(route, progress=True).generate(PROMPTS, SamplingConfig(max_new_tokens=3))
    assert tokens(shown) == tokens(plain)
    assert "5/5" in "".join(capsys.readouterr())


def test_results_are_values():
    """Guards against a result that the caller, or the next call, can change."""
    batch = engine().generate(PROMPTS, SamplingConfig(max_new_tokens=2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.response_start_idx = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.completions[0].text = "x"
    rollouts = engine()
    first = rollouts.generate(PROMPTS, SamplingConfig(max_new_tokens=BUDGET))
    kept = first.input_ids.clone()
    rollouts.generate(PROMPTS[::-1], SamplingConfig(max_new_tokens=BUDGET, temperature=1.0))
    assert first.input_ids.equal(kept)
    assert "stats" not in repr(first)


def test_a_batch_made_in_inference_mode_is_trained_on():
    """Guards against tensors that no loss may be computed from, because of the mode the rollout was called in."""
    with torch.inference_mode():
        batch = RolloutEngine(MODEL).generate([[1, 2], [3]], SamplingConfig(max_new_tokens=3, raw_logprobs=True))
        assert torch.is_inference_mode_enabled()
    tensors = (batch.input_ids, batch.attention_mask, batch.loss_mask, batch.response_logprobs)
    assert not any(tensor.is_inference() for tensor in (*tensors, batch.response_raw_logprobs))
