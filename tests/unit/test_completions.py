"""Completions as values: kept, sent elsewhere, extended and handed in again, or refused with a reason."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import zoo
from snapshots import ForwardCounter, left_as_found
from texts import character_tokenizer

from liveroll import (
    Completion,
    ConfigError,
    PrefillLimitError,
    PromptError,
    RolloutConfig,
    RolloutEngine,
    SamplingConfig,
    UnsupportedGenerationError,
)

MODEL = zoo.build("llama")
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=5)
SAMPLING = SamplingConfig(max_new_tokens=12, n=2, temperature=1.5)
TESTS = Path(__file__).parents[1]


def engine(**settings):
    return RolloutEngine(MODEL, config=RolloutConfig(**{"max_slots": 4, **settings}))


def partial_batch(told=SAMPLING, **settings):
    return engine(**settings).generate(PROMPTS, told, max_total_tokens=30)


def tokens(completions):
    return [list(completion.token_ids) for completion in completions]


def test_through_pickle_and_json():
    """Guards against a field that is lost or changed on the way, such as a float that is rounded."""
    told = dataclasses.replace(SAMPLING, raw_logprobs=True, top_logprobs=2, kept_tokens=60, top_k=50)
    completions = partial_batch(told).completions
    assert pickle.loads(pickle.dumps(completions)) == completions
    text = json.dumps([dataclasses.asdict(completion) for completion in completions], allow_nan=False)
    again = [Completion(**fields) for fields in json.loads(text)]
    for one, other in zip(again, completions, strict=True):
        for field in dataclasses.fields(Completion):
            assert getattr(one, field.name) == getattr(other, field.name), field.name
            assert type(getattr(one, field.name)) is type(getattr(other, field.name)), field.name


def test_continued_in_another_process(tmp_path):
    """Guards against a continuation that needs anything but the weights and the completions."""
    whole = engine().generate(PROMPTS, SAMPLING)
    completions = partial_batch().completions
    (tmp_path / "completions.json").write_text(json.dumps([dataclasses.asdict(c) for c in completions]), "utf-8")
    (tmp_path / "completions.pickle").write_bytes(pickle.dumps(completions))
    script = """
        import json, pickle, sys, torch
        torch.set_num_threads(1)
        from pathlib import Path
        import zoo
        from liveroll import Completion, RolloutConfig, RolloutEngine, SamplingConfig
        folder = Path(sys.argv[1])
        texts = json.loads((folder / "completions.json").read_text("utf-8"))
        engine = RolloutEngine(zoo.build("llama"), config=RolloutConfig(seed=77))
        sampling = SamplingConfig(max_new_tokens=12, n=2, temperature=1.5)
        pickled = pickle.loads((folder / "completions.pickle").read_bytes())
        for given in ([Completion(**fields) for fields in texts], pickled):
            joined = engine.generate(continue_from=given, sampling=sampling)
            print(json.dumps([completion.token_ids for completion in joined.completions]))
    """
    path = os.pathsep.join([str(TESTS), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [tokens(whole.completions)] * 2


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, iter])
def test_extended(kind):
    """Guards against an extension that changes the completion it is made of, or counts as sampled."""
    completion = engine().generate(PROMPTS[:1], SamplingConfig(max_new_tokens=3)).completions[0]
    longer = completion.extend(kind([7, 8]))
    assert longer.token_ids == (*completion.token_ids, 7, 8)
    assert all(type(token) is int for token in longer.token_ids)
    assert longer.logprobs == (*completion.logprobs, 0.0, 0.0)
    assert (longer.raw_logprobs, longer.top_logprobs, longer.kept_tokens) == (None, None, None)
    assert longer.sampled_mask == (1, 1, 1, 0, 0)
    assert (longer.sampled_tokens, longer.finish_reason, longer.stop, longer.text) == (3, "aborted", None, None)
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 3)
    assert longer.extend([]) == longer


@pytest.mark.parametrize("wrong", [[-1], [1.0], [True], ["1"], "ab", [None], None, 7], ids=str)
def test_extended_by_what_is_no_token(wrong):
    """Guards against tokens that fail only on the device."""
    completion = engine().generate(PROMPTS[:1], SamplingConfig(max_new_tokens=3)).completions[0]
    with pytest.raises(PromptError, match="is none"):
        completion.extend(wrong)


def test_text_after_an_extension():
    """Guards against a completion that keeps the text it had before it was extended."""
    tokenizer = character_tokenizer()
    rollouts = RolloutEngine(MODEL, tokenizer)
    first = rollouts.generate(["hello"], SamplingConfig(max_new_tokens=3)).completions[0]
    more = tokenizer(" so ")["input_ids"]
    for budget in (3, 5):
        batch = rollouts.generate(continue_from=[first.extend(more)], sampling=SamplingConfig(max_new_tokens=budget))
        (completion,) = batch.completions
        assert completion.text.startswith(first.text + " so ")
        assert len(completion.text) == budget + 4
        assert completion.finish_reason == "length"


def test_what_was_finished_is_passed_through():
    """Guards against a finished completion that takes on the settings of a call which has nothing to do with it."""
    rollouts = RolloutEngine(MODEL, character_tokenizer())
    prompt = ["hello"]
    text = rollouts.generate(prompt, SamplingConfig(max_new_tokens=8)).completions[0].text
    first = rollouts.generate(prompt, SamplingConfig(max_new_tokens=8, stop=text[3:5], n=2))
    assert {completion.text for completion in first.completions} == {text[:5]}
    other = SamplingConfig(max_new_tokens=2, stop=text[3:5], include_stop=False, logprobs=False, min_new_tokens=1)
    again = rollouts.generate(continue_from=first, sampling=other)
    assert again.completions == first.completions
    assert again.completions[0].logprobs is not None
    assert again.input_ids.equal(first.input_ids)


def change(**fields):
    return lambda completions: [dataclasses.replace(completions[0], **fields), *completions[1:]]


BAD = {
    "nothing": (lambda completions: None, "nothing to generate; give prompts, or"),
    "no completions": (lambda completions: [], "nothing to generate; give prompts, or"),
    "one completion": (lambda completions: completions[0], "must be a RolloutBatch or a list of completions"),
    "token ids": (lambda completions: [[1, 2]], "must be a RolloutBatch or a list of completions"),
    "an id too high": (change(token_ids=(97,), sampled_mask=(1,), logprobs=(0.0,)), "completion 0 holds token id 97"),
    "an id that is none": (
        change(token_ids=(0.5,), sampled_mask=(1,), logprobs=(0.0,)),
        "completion 0 must be made of",
    ),
    "a short mask": (change(sampled_mask=()), "completion 0 has .* another length"),
    "short log-probabilities": (change(logprobs=(0.0,)), "completion 0 has .* another length"),
    "a mask of other numbers": (
        lambda completions: [dataclasses.replace(completions[0], sampled_mask=(2,) * len(completions[0].token_ids))],
        "sampled_mask of completion 0 must be zeros and ones",
    ),
    "no tokens": (change(token_ids=None), "token_ids of completion 0 must be a tuple of token ids"),
    "an array of tokens": (
        change(token_ids=np.array([1, 2])),
        "token_ids of completion 0 must be a tuple of token ids",
    ),
    "an array of a prompt": (
        change(prompt_ids=np.array([1])),
        "prompt_ids of completion 0 must be a tuple of token ids",
    ),
    "no mask": (change(sampled_mask=None), "sampled_mask of completion 0 must be zeros and ones"),
    "log-probabilities that are words": (
        lambda completions: [dataclasses.replace(completions[0], logprobs=("a",) * len(completions[0].token_ids))],
        "logprobs of completion 0 must be numbers, or None",
    ),
    "log-probabilities with gaps": (
        lambda completions: [dataclasses.replace(completions[0], raw_logprobs=(None,) * len(completions[0].token_ids))],
        "raw_logprobs of completion 0 must be numbers, or None",
    ),
    "one alternative": (change(top_logprobs=5), "top_logprobs of completion 0 must be pairs"),
    "kept tokens by name": (change(kept_tokens="all"), "kept_tokens of completion 0 must be ids"),
    "continued at a word": (change(continued_at="here"), "continued_at of completion 0 must be numbers of tokens"),
    "another reason": (change(finish_reason="ended"), "finish_reason of completion 0 must be one of stop, length"),
    "a prompt by name": (change(prompt_index="first"), "prompt_index of completion 0 must be a whole number"),
    "a sample that is none": (change(sample_index=None), "sample_index of completion 0 must be a whole number"),
    "half a stream": (change(stream=(1,)), "stream of completion 0 must be two whole numbers"),
    "a stream of words": (change(stream=("a", "b")), "stream of completion 0 must be two whole numbers"),
    "a stream too long": (change(stream=(2**31, 0)), "stream of completion 0 must be two whole numbers"),
    "no stream": (change(stream=None), "completion 0 was drawn by model.generate"),
    "an empty prompt": (change(prompt_ids=()), "prompt 0 is empty"),
    "a strange prompt": (change(prompt_ids=(1, 97)), "prompt 0 holds token id 97"),
    "strange padding": (change(padding_ids=(97,)), "completion 0 holds token id 97"),
    "no log-probabilities": (change(logprobs=None), "prompt 0 is to be continued with logprobs and has none"),
    "no room": (change(prompt_ids=(1,) * 505), "prompt 0 has 505 tokens and max_new_tokens is 12"),
}


@pytest.mark.parametrize(("name", "value"), [("raw_logprobs", True), ("top_logprobs", 2), ("kept_tokens", 50)])
def test_what_was_not_told_of_earlier_tokens(name, value):
    """Guards against numbers that nobody computed in place of those that were not asked for."""
    asking = dataclasses.replace(
        SAMPLING, top_k=40, **{name: True if name == "raw_logprobs" else 50 if name[0] == "k" else 2}
    )
    batch = partial_batch(dataclasses.replace(SAMPLING, top_k=40))
    with pytest.raises(ConfigError, match=f"is to be continued with {name} and has none"):
        engine().generate(continue_from=batch, sampling=asking)
    told = engine().generate(continue_from=partial_batch(asking), sampling=asking)
    assert all(len(getattr(completion, name)) == len(completion.token_ids) for completion in told.completions)


@pytest.mark.parametrize("name", BAD)
def test_completions_that_cannot_be_continued(name):
    """Guards against a broken completion that is found out by the device, or after a forward."""
    damage, message = BAD[name]
    given = damage(list(partial_batch().completions))
    rollouts = engine()
    for call in (rollouts.generate, rollouts.stream):
        with (
            ForwardCounter(MODEL) as forwards,
            left_as_found(MODEL),
            pytest.raises((PromptError, ConfigError), match=message),
        ):
            call(continue_from=given, sampling=SAMPLING)
        assert forwards.count == 0


def test_a_batch_with_other_completions():
    """Guards against completions that are paired with the prompts of others."""
    batch = partial_batch()
    with pytest.raises(PromptError, match="10 rows and 9 completions"):
        engine().generate(continue_from=dataclasses.replace(batch, completions=batch.completions[1:]))


def test_completions_without_log_probabilities():
    """Guards against numbers that nobody computed in place of those that were not asked for."""
    without = SamplingConfig(max_new_tokens=12, n=2, temperature=1.5, logprobs=False)
    batch = engine().generate(PROMPTS, without, max_total_tokens=30)
    joined = engine().generate(continue_from=batch, sampling=without)
    assert tokens(joined.completions) == tokens(engine().generate(PROMPTS, SAMPLING).completions)
    assert {completion.logprobs for completion in joined.completions} == {None}
    never_begun = [completion for completion in batch.completions if not completion.token_ids]
    assert never_begun
    later = engine().generate(continue_from=never_begun, sampling=SAMPLING)
    assert all(len(completion.logprobs) == 12 for completion in later.completions)


def test_samples_of_several_calls():
    """Guards against samples of one place in two calls that are taken for one, or for one group."""
    first, second = partial_batch(seed=1), partial_batch(seed=2)
    pair = [first.completions[1], second.completions[1]]
    joined = engine().generate(continue_from=[*pair, *first.completions[:2]], sampling=SAMPLING)
    assert [(c.prompt_index, c.sample_index) for c in joined.completions] == [(0, 1), (1, 1), (2, 0), (2, 1)]
    assert len(joined.sampling) == 3


BAD_PREFIXES = {
    "too few": ([[1]], ConfigError, "1 response prefixes were given for 2 prompts"),
    "text without a tokenizer": ("ab", PromptError, "response prefix of prompt 0 is text .* no tokenizer"),
    "an id too high": ([None, [97]], PromptError, "response prefix of prompt 1 holds token id 97"),
    "floats": ([[1.0], None], PromptError, "response prefix of prompt 0 must be a string or a list of token ids"),
    "a mapping": ({"a": 1}, PromptError, "response prefix of prompt 0 must be"),
}


@pytest.mark.parametrize("name", BAD_PREFIXES)
def test_prefixes_that_cannot_be(name):
    """Guards against a prefix that is left out, or read as something else."""
    given, error, message = BAD_PREFIXES[name]
    with pytest.raises(error, match=message):
        engine().generate([[1], [2]], SAMPLING, response_prefix=given)


def test_a_prefix_of_numpy_integers():
    """Guards against the ids of one prefix taken for prefixes of several prompts."""
    given = engine().generate([[1], [2]], SAMPLING, response_prefix=list(np.array([7, 8])))
    assert [completion.token_ids[:2] for completion in given.completions] == [(7, 8)] * len(given.completions)


def test_prefixes_where_nothing_is_new():
    """Guards against a prefix that is silently without effect."""
    with pytest.raises(ConfigError, match="response_prefix begins responses to new prompts"):
        engine().generate(continue_from=partial_batch(), sampling=SAMPLING, response_prefix=[1])


def test_forced_tokens_count_towards_the_lengths():
    """Guards against a row that outgrows what was allowed because its forced tokens were not counted."""
    short = SamplingConfig(max_new_tokens=4)
    with pytest.raises(PromptError, match=r"3 tokens and 10 forced ones behind it .* together 17, .*max_length is 16"):
        engine(max_length=16).generate([[1, 2, 3]], short, response_prefix=[1] * 10)
    with pytest.raises(PromptError, match=r"500 forced ones .*max_position_embeddings is 512"):
        engine().generate([[1] * 9], short, response_prefix=[1] * 500)
    with pytest.raises(PrefillLimitError, match="prompt 0 has 13 tokens and prefill_max_tokens is 12"):
        engine(prefill_max_tokens=12).generate([[1, 2, 3]], short, response_prefix=[1] * 10)
    batch = engine(max_length=17, prefill_max_tokens=13).generate([[1, 2, 3]], short, response_prefix=[1] * 10)
    assert len(batch.completions[0].token_ids) == 14
    more = [completion.extend([5] * 4) for completion in batch.completions]
    with pytest.raises(PromptError, match="14 forced ones"):
        engine(max_length=17).generate(continue_from=more, sampling=SamplingConfig(max_new_tokens=5))
    longer = engine(prefill_max_tokens=13).generate(continue_from=more, sampling=SamplingConfig(max_new_tokens=5))
    assert len(longer.completions[0].token_ids) == 19


def test_the_fallback_does_plain_calls_only():
    """Guards against a limit, prefix or continuation that the fallback silently leaves out."""
    model = zoo.build("llama")
    model.generation_config.num_beams = 2
    model.generation_config.pad_token_id = 0
    rollouts = RolloutEngine(model, config=RolloutConfig(fallback="generate"))
    sampling = SamplingConfig(max_new_tokens=3)
    batch = rollouts.generate(PROMPTS, sampling)
    assert batch.stats.fallback_reason
    assert {completion.stream for completion in batch.completions} == {None}
    assert batch.loss_mask.equal(batch.attention_mask[:, batch.response_start_idx :])
    calls = (
        {"prompts": PROMPTS, "max_seconds": 1.0},
        {"prompts": PROMPTS, "max_total_tokens": 9},
        {"prompts": PROMPTS, "response_prefix": [1]},
        {"continue_from": partial_batch()},
    )
    for arguments in calls:
        with pytest.raises(UnsupportedGenerationError, match="and the fallback, model"):
            rollouts.generate(sampling=sampling, **arguments)
    with pytest.raises(PromptError, match="completion 0 was drawn by"):
        engine().generate(continue_from=batch, sampling=sampling)
