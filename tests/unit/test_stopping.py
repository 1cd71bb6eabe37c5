"""Stop strings are found at the token that completes them, whatever the tokenizer, and cost little on the way."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_device import make_request
from hypothesis import event, given, settings
from hypothesis import strategies as st
from texts import CORPUS, bpe_tokenizer, byte_tokenizer, sentencepiece_tokenizer, wordpiece_tokenizer
from transformers import AutoTokenizer, StopStringCriteria

from liveroll.stopping import StopStrings, text_until

steady = settings(deadline=None, derandomize=True, database=None)
TOKENIZERS = {
    "bytes": byte_tokenizer,
    "byte-level BPE": bpe_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "wordpiece": wordpiece_tokenizer,
}
each_tokenizer = pytest.mark.parametrize("kind", TOKENIZERS)


def text_of(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=False)


def slow_search(tokenizer, tokens, strings, forced):
    """How many tokens it takes, and the string: by decoding everything after each token."""
    before = text_of(tokenizer, tokens[:forced])
    for end in range(forced + 1, len(tokens) + 1):
        after = text_of(tokenizer, tokens[:end])
        shared = 0
        while shared < min(len(before), len(after)) and before[shared] == after[shared]:
            shared += 1
        places = [(at, string) for string in strings for at in range(len(after)) if after.startswith(string, at)]
        if new := [(at, string) for at, string in places if at + len(string) > shared]:
            return end, min(new)[1]
        before = after
    return None


def search(tokenizer, tokens, strings, forced=0):
    request = make_request(0, 1, 99, stop=tuple(strings))
    finder = StopStrings(tokenizer)
    for end in range(forced + 1, len(tokens) + 1):
        if found := finder.search(request, np.array(tokens[:end], np.int64)):
            return end, found
    return None


@st.composite
def searches(draw, kind):
    """Any tokens, and strings most of which are somewhere in their text."""
    tokenizer = TOKENIZERS[kind]()
    tokens = draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=40))
    text = text_of(tokenizer, tokens)
    strings = []
    for _ in range(draw(st.integers(1, 3))):
        start, length = draw(st.integers(0, max(len(text) - 1, 0))), draw(st.integers(1, 5))
        strings.append(text[start : start + length] or draw(st.text(min_size=1, max_size=3)))
    return tokens, tuple(strings), draw(st.integers(0, len(tokens) - 1))


@each_tokenizer
def test_as_if_everything_were_decoded_at_every_token(kind):
    """Guards against strings found late, early or not at all: characters cut in half, hidden spaces, forced tokens."""
    tokenizer = TOKENIZERS[kind]()

    @settings(steady, max_examples=300)
    @given(searches(kind))
    def check(case):
        tokens, strings, forced = case
        expected = slow_search(tokenizer, tokens, strings, forced)
        event(f"found: {expected is not None}")
        assert search(tokenizer, tokens, strings, forced) == expected

    check()


PIECES = {
    "the end of a character": ("bytes", [*"a\u00f0\u0141\u013b\u0124", "b"], "🙂", 5),
    "a space that belongs to the next word": ("sentencepiece", ["▁the", "▁the", "▁stop"], "e s", 3),
    "a space in front of the next word": ("sentencepiece", ["▁the", "▁the", "▁stop"], "e ", 2),
    "a line end in a longer token": ("sentencepiece", ["a", "\n\n", "b"], "a\n", 2),
    "a character in bytes": ("sentencepiece", ["a", "<0xC3>", "<0xA9>", "b"], "aé", 3),
    "bytes that make no character": ("sentencepiece", ["a", "<0xC3>", "<0x41>", "<0x42>"], "B", None),
    "a long run of bytes that make no character": ("sentencepiece", ["a", "<0xFF>", *["<0x42>"] * 30], "B", None),
    "a space that no token holds": ("wordpiece", ["the", "stop"], "e s", 2),
    "what a later character tidies up": ("wordpiece", ["do", ".", "do", "not"], "o. d", 3),
    "what a later token without it tidies up": ("wordpiece", ["do", "'", "t"], "do'", 3),
}


@pytest.mark.parametrize("name", PIECES)
def test_found_where_a_reader_sees_it(name):
    """Guards against each way in which tokens and text do not line up, by an example that a person can read."""
    kind, pieces, stop, end = PIECES[name]
    tokenizer = TOKENIZERS[kind]()
    tokens = tokenizer.convert_tokens_to_ids(pieces)
    assert tokenizer.unk_token_id not in tokens
    assert search(tokenizer, tokens, ["never", stop]) == (end and (end, stop))


@each_tokenizer
def test_the_text_ends_with_the_string_or_before_it(kind):
    """Guards against a text that keeps what the last token brings behind the string, or loses what is in front."""
    tokenizer = TOKENIZERS[kind]()

    @settings(steady, max_examples=150)
    @given(searches(kind))
    def check(case):
        tokens, strings, forced = case
        if (found := slow_search(tokenizer, tokens, strings, forced)) is None:
            return
        response, stop = tokens[: found[0]], found[1]
        kept, cut = (text_until(tokenizer, response, stop, include=include) for include in (True, False))
        shown = tokenizer.decode(response, skip_special_tokens=True)
        assert shown.startswith(kept)
        event(f"special tokens in the string: {not kept.endswith(stop)}")
        if kept.endswith(stop):
            assert kept == cut + stop
        else:
            assert kept == shown
            # Without the special token between them, two parts of a character make one.
            assert shown.startswith(cut.rstrip("\ufffd"))

    check()


def test_a_string_over_special_tokens():
    """Guards against a text from which the string cannot be cut, since it does not show it."""
    tokenizer = byte_tokenizer()
    tokens = [*tokenizer("so<eos>done")["input_ids"], tokenizer.eos_token_id]
    assert search(tokenizer, tokens, ["o<eos>"]) == (3, "o<eos>")
    assert text_until(tokenizer, tokens[:3], "o<eos>", include=False) == "s"
    assert text_until(tokenizer, tokens[:3], "o<eos>", include=True) == "so"
    assert text_until(tokenizer, tokens, "ne<eos>", include=False) == "sodo"
    assert text_until(tokenizer, tokens, "s>", include=False) == text_until(tokenizer, tokens, "s>", include=True)


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.decoded = []

    def decode(self, tokens, **settings):
        self.decoded.append(len(tokens))
        return self.tokenizer.decode(tokens, **settings)

    def convert_ids_to_tokens(self, token):
        return self.tokenizer.convert_ids_to_tokens(token)


@pytest.mark.parametrize("kind", ["byte-level BPE", "bytes"])
def test_a_long_response_costs_no_more_a_token(kind):
    """Guards against the response being decoded in whole, or for tokens that cannot complete a string."""
    counting = Counting(TOKENIZERS[kind]())
    tokens = counting.tokenizer(CORPUS * 8, add_special_tokens=False)["input_ids"]
    assert search(counting, tokens, ["zz"]) is None
    different = len(set(tokens))
    assert sum(counting.decoded) == len(counting.decoded) <= different
    counting.decoded.clear()
    assert search(counting, tokens, ["answer is not"]) is None
    assert max(counting.decoded) <= 4 * (2 * 13 + 8)
    assert len(counting.decoded) < different + len(tokens) / 2


def gemma():
    folder = Path(os.environ.get("LIVEROLL_MODELS", Path.home() / ".cache" / "liveroll-models")) / "gemma3-270m"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("the tokenizer of Gemma 3 is not on this machine")
    return AutoTokenizer.from_pretrained(folder)


def first_hit(criteria, tokens):
    """After how many tokens `model.generate(stop_strings=...)` ends."""
    for end in range(1, len(tokens) + 1):
        if criteria(torch.tensor([tokens[:end]]), None)[0]:
            return end
    return None


FROM_CORPUS = ("42", "wer is 4", "e ans", "</think>", " STOP.", "Observation:", "\n\nQ", "answer?\n", "never")


@pytest.mark.parametrize(
    ("make", "strings"),
    [(bpe_tokenizer, FROM_CORPUS), (gemma, (" STOP.", "\n\nQ"))],
    ids=["byte-level BPE", "Gemma 3"],
)
def test_as_in_generate(make, strings):
    """Guards against another end than `model.generate(stop_strings=...)` has: that is where users come from."""
    tokenizer = make()
    tokens = tokenizer(CORPUS, add_special_tokens=False)["input_ids"]
    for stop in strings:
        criteria = StopStringCriteria(tokenizer, [stop])
        found = search(tokenizer, tokens, [stop])
        assert (found and found[0]) == first_hit(criteria, tokens), stop
