"""Stop strings, found in the text of the tokens sampled so far."""

from __future__ import annotations

from typing import Any

import numpy as np

from liveroll.errors import ConfigError
from liveroll.scheduling.request import Request

# A character takes at most four byte-level tokens; the rest is for special tokens, which may decode to nothing.
_TOKENS_PER_CHARACTER = 4
_MARGIN = 16


class StopStrings:
    """Searches the end of responses for their stop strings.

    Args:
        tokenizer: decodes responses.
    """

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer is None:
            raise ConfigError("SamplingConfig.stop needs text, and the engine has no tokenizer; pass one")
        self._tokenizer = tokenizer

    def search(self, request: Request, tokens: np.ndarray) -> str | None:
        """The first of the request's stop strings in the end of `tokens`, int64 `[R]`.

        Searched after every token, a match always ends in the last of them, so the end is all there is to decode.
        """
        longest = max(len(string) for string in request.sampling.stop)
        tail = tokens[-(_TOKENS_PER_CHARACTER * longest + _MARGIN) :].tolist()
        text = self._tokenizer.decode(tail, skip_special_tokens=False)
        found = [(text.index(string), string) for string in request.sampling.stop if string in text]
        return min(found)[1] if found else None
