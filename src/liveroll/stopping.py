"""Stop strings: found at the token that completes them, and where the text ends because of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from liveroll.errors import ConfigError
from liveroll.scheduling.request import Request

_REPLACEMENT = "\ufffd"
# How tokenizers of the SentencePiece family write a token that is one byte.
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Characters decoded in front of those that a stop string can take, for decoders that drop spaces.
_MARGIN = 8


@dataclass(frozen=True)
class _Token:
    """What a token decodes to by itself.

    Attributes:
        text: with U+FFFD for each part of a character.
        length: characters that it brings to a response, at least.
        is_byte: whether it is decoded together with the bytes beside it.
    """

    text: str
    length: float
    is_byte: bool


class StopStrings:
    """Finds stop strings in responses, token by token.

    The text searched is what the response's tokens decode to, special tokens included. A string counts when a
    sampled token completes it, wherever it begins; one that was whole before that token does not.

    Most tokens cannot complete a string, which their own text shows; that is looked up. For the others two short
    ends of the response are decoded.

    Args:
        tokenizer: decodes responses.

    Raises:
        ConfigError: there is no tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer is None:
            raise ConfigError("SamplingConfig.stop needs text, and the engine has no tokenizer; pass one")
        self._tokenizer = tokenizer
        # A decoder that tidies spaces up may complete a string by any later character.
        self._tidies = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._tokens: dict[int, _Token] = {}
        self._completing: dict[tuple[str, ...], dict[int, bool]] = {}

    def search(self, request: Request, tokens: np.ndarray) -> str | None:
        """The request's stop string that the last token completes, the one that begins first; None without one.

        Args:
            request: has stop strings.
            tokens: int64 response tokens `[R]` behind the prefix; the last was sampled, and all before it were
                searched or forced.
        """
        strings = request.sampling.stop
        if not self._may_complete(strings, int(tokens[-1])):
            return None
        if len(request.prefix):
            tokens = np.concatenate([request.prefix, tokens])
        tail = tokens[self._tail_start(tokens, max(map(len, strings))) :].tolist()
        found = find_completed(self._decode(tail[:-1]), self._decode(tail), strings)
        return None if found is None else found[1]

    def _may_complete(self, strings: tuple[str, ...], token: int) -> bool:
        """Whether the token's own text has the last character of a string, as far as decoders let it be seen."""
        known = self._completing.setdefault(strings, {})
        if token not in known:
            own = self._look_up(token)
            ends = {string[-1] for string in strings}
            # Spaces may be dropped around a token that stands alone, and a part may complete any longer character.
            hidden = self._tidies or not ends.isdisjoint({" ", _REPLACEMENT})
            part = _REPLACEMENT in own.text and (own.is_byte or not "".join(ends).isascii())
            known[token] = hidden or part or not ends.isdisjoint(own.text)
        return known[token]

    def _tail_start(self, tokens: np.ndarray, longest: int) -> int:
        """Where an end of the response begins that decodes to what it is in the whole, but for its first token."""
        start, missing = len(tokens) - 1, 2.0 * longest + _MARGIN
        while start > 0 and (missing > 0 or self._look_up(int(tokens[start])).is_byte):
            missing -= self._look_up(int(tokens[start])).length
            start -= 1
        return start

    def _look_up(self, token: int) -> _Token:
        if token not in self._tokens:
            text = self._decode([token])
            # A character has four bytes at most, and no token is less than one of them.
            length = len(text.replace(_REPLACEMENT, "")) or 0.25 * bool(text)
            name = self._tokenizer.convert_ids_to_tokens(token)
            self._tokens[token] = _Token(text, length, isinstance(name, str) and bool(_BYTE.fullmatch(name)))
        return self._tokens[token]

    def _decode(self, tokens: Sequence[int]) -> str:
        return decode(self._tokenizer, tokens, special=True)


def find_completed(before: str, after: str, strings: Sequence[str]) -> tuple[int, str] | None:
    """The string of `after` that begins first among those that end in what it does not share with `before`.

    Returns:
        Where it begins, and the string; of several that begin there, the shortest.
    """
    shared = next((i for i, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), len(before))
    places = [(after.find(string, max(shared - len(string) + 1, 0)), string) for string in strings]
    return min((place for place in places if place[0] >= 0), default=None)


def text_until(tokenizer: Any, tokens: Sequence[int], stop: str, *, include: bool) -> str:
    """The text of a response up to the stop string that its last token completes, special tokens left out.

    Args:
        tokenizer: decodes.
        tokens: the response.
        stop: the string.
        include: whether the text keeps the string; what the last token brings behind it is never kept.
    """
    shown = decode(tokenizer, tokens)
    if found := find_completed(decode(tokenizer, tokens[:-1]), shown, (stop,)):
        return shown[: found[0] + (len(stop) if include else 0)]
    if include:
        return shown
    # The string runs over special tokens.
    whole = decode(tokenizer, tokens, special=True)
    found = find_completed(decode(tokenizer, tokens[:-1], special=True), whole, (stop,))
    if found is None:
        raise ValueError(f"the response does not end with {stop!r}")
    count = len(tokens)
    while len(start := decode(tokenizer, tokens[:count], special=True)) > found[0]:
        count -= 1
    begun = whole[len(start) : found[0]] if decode(tokenizer, tokens[count : count + 1]) else ""
    return decode(tokenizer, tokens[:count]) + begun


def decode(tokenizer: Any, tokens: Sequence[int], *, special: bool = False) -> str:
    """The text of tokens, with special tokens or without."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=not special)
    return text
