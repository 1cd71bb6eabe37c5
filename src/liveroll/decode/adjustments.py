"""The tokens whose scores a request adjusts one by one: biased, forbidden, or held back for a while."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from liveroll.types import ResolvedSampling

ABSENT = 2**31 - 1
"""Fills lists of adjusted tokens up: an id behind every vocabulary."""

_ALWAYS = 2**31 - 1


@dataclass(frozen=True)
class Adjustments:
    """One entry for each adjusted token, ascending.

    Attributes:
        tokens: int32 ids.
        bias: float32, added to their logits.
        until: int32, how many tokens a response must have before they may be sampled.
    """

    tokens: np.ndarray
    bias: np.ndarray
    until: np.ndarray


def adjustments_of(sampling: ResolvedSampling) -> Adjustments:
    """The adjustments of a request: logit biases, forbidden tokens, and stop tokens before their time."""
    bias, until = dict(sampling.logit_bias), dict.fromkeys(sampling.first_forbidden_tokens, 1)
    if sampling.min_new_tokens > 0:
        until |= dict.fromkeys(sampling.stop_token_ids, sampling.min_new_tokens)
    until |= dict.fromkeys(sampling.forbidden_tokens, _ALWAYS)
    tokens = sorted({*bias, *until})
    return Adjustments(
        np.array(tokens, np.int32),
        np.array([bias.get(token, 0.0) for token in tokens], np.float32),
        np.array([until.get(token, 0) for token in tokens], np.int32),
    )


def most_adjusted(samplings: Iterable[ResolvedSampling]) -> int:
    """Adjusted tokens of the request that has most."""
    return max((len(adjustments_of(sampling).tokens) for sampling in dict.fromkeys(samplings)), default=0)
