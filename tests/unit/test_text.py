"""Text in and out: strings, messages, decoded completions, and stop strings wherever their tokens begin and end."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import zoo
from texts import CHAT_TEMPLATE, bpe_tokenizer, byte_tokenizer, character_tokenizer

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig

ROUTES = ("packed", "equal_width", "per_prompt", "ordinary")
TOKENIZER = character_tokenizer()
MODEL = zoo.build("llama")
BYTES = byte_tokenizer()
BYTE_MODEL = zoo.build("llama", vocab_size=len(BYTES))
BUDGET = 12
GREEDY = SamplingConfig(max_new_tokens=BUDGET)
PROMPTS = ["hello", "a", "words"]  # their responses hold no special token

pytestmark = pytest.mark.parametrize("route", ROUTES)


def engine(route, model=MODEL, tokenizer=TOKENIZER, **settings):
    return RolloutEngine(model, tokenizer, RolloutConfig(prefill_route=route, page_size=4, max_slots=2, **settings))


def responses(prompts=PROMPTS, model=MODEL, tokenizer=TOKENIZER, **kwargs):
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    return [zoo.reference(model, prompt, **{"max_new_tokens": BUDGET, **kwargs}) for prompt in ids]


def writing(text, prompt="x"):
    """A byte model that answers `prompt` with `text`, since every token knows its successor, and then with eos.

    Every byte of the text must be another; the prompt is one more.
    """
    ids = [*BYTES(prompt)["input_ids"], *BYTES(text)["input_ids"], BYTES.eos_token_id]
    assert len(set(ids)) == len(ids)
    model = zoo.build("llama", vocab_size=len(BYTES), hidden_size=64, num_attention_heads=4)
    embedding, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
    embedding.zero_()
    head.zero_()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.model.norm.weight.data.fill_(1.0)
    for place, (token, following) in enumerate(pairwise(ids)):
        embedding[token, place] = 1.0
        head[following, place] = 1.0
    model.generation_config.eos_token_id = BYTES.eos_token_id
    return model


def test_text_in_and_out(route):
    """Guards against text tokenized or decoded otherwise than the tokenizer does, or special tokens in it."""
    batch = engine(route).generate(PROMPTS, GREEDY)
    assert [list(completion.token_ids) for completion in batch.completions] == responses()
    for completion in batch.completions:
        assert completion.text == TOKENIZER.decode(completion.token_ids, skip_special_tokens=True)
    ids = [TOKENIZER(prompt)["input_ids"] for prompt in PROMPTS]
    assert engine(route).generate(ids, GREEDY).completions == batch.completions
    mixed = [PROMPTS[0], ids[1], tuple(ids[2])]
    assert engine(route).generate(mixed, GREEDY).completions == batch.completions


def test_messages(route):
    """Guards against a conversation without the turn that asks for the answer."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = CHAT_TEMPLATE
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    batch = engine(route, tokenizer=tokenizer).generate([talk, "hello"], GREEDY)
    expected = responses(["s:be brief;u:hi;a:", "hello"])
    assert [list(completion.token_ids) for completion in batch.completions] == expected


def test_an_end_of_text_is_not_in_the_text(route):
    """Guards against `<eos>` in the text, or the tokenizer's eos ending what the model's does not."""
    row = responses()[0]
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": [TOKENIZER.convert_ids_to_tokens(row[3])]})
    batch = engine(route, tokenizer=tokenizer).generate(
        PROMPTS, SamplingConfig(max_new_tokens=BUDGET, stop_token_ids=(row[3],))
    )
    assert batch.completions[0].token_ids == tuple(row[:4])
    assert batch.completions[0].text == TOKENIZER.decode(row[:3])
    assert batch.completions[0].stop == row[3]


@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_stop_string_across_tokens(route, length):
    """Guards against a stop string found late, early, or only where it is one token."""
    rows = responses()
    texts = [TOKENIZER.decode(row) for row in rows]
    stop = texts[0][3 : 3 + length]
    batch = engine(route).generate(PROMPTS, SamplingConfig(max_new_tokens=BUDGET, stop=(stop, "never")))
    for completion, row, text in zip(batch.completions, rows, texts, strict=True):
        end = text.index(stop) + length if stop in text else BUDGET
        assert completion.token_ids == tuple(row[:end])
        assert completion.text == text[:end]
        assert len(completion.logprobs) == end
        assert (completion.finish_reason, completion.stop) == (("stop", stop) if stop in text else ("length", None))


def test_the_first_of_several_stop_strings(route):
    """Guards against the order in which strings are given deciding which ends the response."""
    text = TOKENIZER.decode(responses()[0])
    early, late = text[2:4], text[6:8]
    for stop in ((late, early), (early, late)):
        completion = (
            engine(route).generate(PROMPTS[:1], SamplingConfig(max_new_tokens=BUDGET, stop=stop)).completions[0]
        )
        assert (completion.text, completion.stop) == (text[:4], early)


def test_a_stop_string_in_the_prompt_alone(route):
    """Guards against a response that ends at once, since its prompt holds the string."""
    batch = engine(route).generate(PROMPTS, SamplingConfig(max_new_tokens=BUDGET, stop="hello"))
    assert [list(completion.token_ids) for completion in batch.completions] == responses()


def test_a_stop_string_and_a_stop_token(route):
    """Guards against a string looked for behind the end: rows that ended are fed on beside those that run."""
    rows = responses()
    texts = [TOKENIZER.decode(row) for row in rows]
    for end in range(1, BUDGET):
        token, string = rows[0][end], texts[1][end]
        sampling = SamplingConfig(max_new_tokens=BUDGET, stop_token_ids=(token,), stop=string)
        for completion, row, text in zip(
            engine(route).generate(PROMPTS, sampling).completions, rows, texts, strict=True
        ):
            at_token = row.index(token) if token in row else BUDGET
            at_string = text.index(string) if string in text else BUDGET
            stop = None if at_token == at_string == BUDGET else string if at_string <= at_token else token
            assert completion.token_ids == tuple(row[: min(at_token, at_string) + 1])
            assert completion.stop == stop


def test_a_stop_string_for_one_prompt(route):
    """Guards against a neighbour's stop string ending a row."""
    rows = responses()
    stop = TOKENIZER.decode(rows[0])[2]
    settings = [GREEDY, GREEDY, SamplingConfig(max_new_tokens=BUDGET, stop=stop)]
    batch = engine(route).generate([PROMPTS[0]] * 3, settings)
    first = TOKENIZER.decode(rows[0]).index(stop) + 1
    assert [len(completion.token_ids) for completion in batch.completions] == [BUDGET, BUDGET, first]


@pytest.mark.parametrize("stop", ["é", "🙂", "b🙂", "🙂c", "éb🙂"])
def test_a_stop_string_of_several_bytes(route, stop):
    """Guards against a character cut in half: its bytes are tokens, and only the last one completes it."""
    text = "aéb🙂cd"
    model = writing(text)
    completion = engine(route, model, BYTES).generate(["x"], GREEDY).completions[0]
    assert (completion.text, completion.stop) == (text, BYTES.eos_token_id)
    completion = (
        engine(route, model, BYTES).generate(["x"], SamplingConfig(max_new_tokens=BUDGET, stop=stop)).completions[0]
    )
    assert completion.text == text[: text.index(stop) + len(stop)]
    assert len(completion.token_ids) == len(completion.text.encode())
    assert completion.stop == stop


def test_a_budget_that_ends_inside_a_character(route):
    """Guards against a decoding error, or a token dropped, where the text is cut in mid-character."""
    completion = engine(route, writing("ab🙂"), BYTES).generate(["x"], SamplingConfig(max_new_tokens=4)).completions[0]
    assert len(completion.token_ids) == 4
    assert completion.text == "ab�"


def test_a_stop_string_after_preemption(route):
    """Guards against a string whose beginning was sampled before the row lost its pages."""
    rows = responses(max_new_tokens=20)
    stop = TOKENIZER.decode(rows[0])[12:16]
    sampling = SamplingConfig(max_new_tokens=20, stop=stop)
    batch = engine(route, kv_tokens=28).generate(PROMPTS, sampling)
    assert list(batch.completions[0].token_ids) == rows[0][:16]
    assert batch.completions[0].stop == stop
    assert bool(batch.stats.preemptions) == (route != "ordinary")


def test_stop_strings_in_a_stream(route):
    """Guards against a stream that gives a row before its stop string has ended it."""
    text = TOKENIZER.decode(responses()[0])
    sampling = SamplingConfig(max_new_tokens=BUDGET, stop=text[4:6])
    completions = {c.prompt_index: c for c in engine(route).stream(PROMPTS, sampling)}
    assert [completions[i] for i in range(3)] == list(engine(route).generate(PROMPTS, sampling).completions)
    assert completions[0].text == text[:6]


@pytest.mark.parametrize("include", [True, False])
def test_a_text_with_its_stop_string_or_without(route, include):
    """Guards against a text cut at the wrong place, or tokens cut with it: the loss needs all that was sampled."""
    text = TOKENIZER.decode(responses()[0])
    sampling = SamplingConfig(max_new_tokens=BUDGET, stop=("never", text[4:6]), include_stop=include)
    completion = engine(route).generate(PROMPTS, sampling).completions[0]
    assert completion.text == (text[:6] if include else text[:4])
    assert completion.token_ids == tuple(responses()[0][:6])
    assert (completion.stop, completion.finish_reason, len(completion.logprobs)) == (text[4:6], "stop", 6)


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_stop_string_that_ends_inside_a_token(route, ahead):
    """Guards against a text that goes on behind the string, where the token that completes it does; and run-ahead."""
    tokenizer = bpe_tokenizer()
    model = zoo.build("llama", vocab_size=len(tokenizer))
    prompt = tokenizer("The answer is")["input_ids"]
    row = zoo.reference(model, prompt, max_new_tokens=30)
    longer = [place for place, token in enumerate(row) if len(tokenizer.decode([token]).strip()) > 2 and place > 2]
    place = longer[0]
    front, token = (
        tokenizer.decode(row[:place]),
        tokenizer.decode(row[: place + 1])[len(tokenizer.decode(row[:place])) :],
    )
    stop = front[-2:] + token[:2]
    assert stop not in front
    for include in (True, False):
        (completion,) = (
            engine(route, model, tokenizer, run_ahead=ahead)
            .generate([prompt], SamplingConfig(max_new_tokens=30, stop=stop, include_stop=include))
            .completions
        )
        assert completion.token_ids == tuple(row[: place + 1])
        assert completion.text == (front + token[:2] if include else front[:-2])


def test_stop_strings_as_in_generate(route):
    """Guards against another end than `model.generate(stop_strings=...)` has, wherever the string begins and ends."""
    tokenizer = bpe_tokenizer()
    model = zoo.build("llama", vocab_size=len(tokenizer))
    prompts = [tokenizer(text)["input_ids"] for text in ("The answer", "Stop here", "x")]
    plain = [zoo.reference(model, prompt, max_new_tokens=24) for prompt in prompts]
    strings = []
    for row in plain:
        text = tokenizer.decode(row)
        pieces = [text[start : start + 3] for start in range(8, len(text) - 3, 7)]
        strings += [piece for piece in pieces if piece.isascii() and piece not in text[:8]][:2]
    assert len(strings) >= 3
    for stop in strings:
        expected = [
            zoo.reference(model, prompt, max_new_tokens=24, stop_strings=[stop], tokenizer=tokenizer)
            for prompt in prompts
        ]
        batch = engine(route, model, tokenizer).generate(prompts, SamplingConfig(max_new_tokens=24, stop=stop))
        assert [list(completion.token_ids) for completion in batch.completions] == expected
        assert any(len(row) < 24 for row in expected)
