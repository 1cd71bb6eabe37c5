"""Which tokens top-k, top-p and min-p keep: the rule, and plain torch that follows it.

Of a row's scores, after penalties and temperature, top-k keeps those that are no less than the k-th, ties included.
Of these, top-p keeps the smallest set of most likely tokens whose probability reaches p (Holtzman et al. 2020,
arXiv:1904.09751); of equal scores at its edge those with the highest ids stay, as in transformers. Min-p keeps the
scores that are no less than the largest plus log(min_p): probabilities of at least that share of the largest (Nguyen
et al. 2024, arXiv:2407.01082). The most likely token always stays.

So a bound is all there is to know of the kept set: a score, and of the tokens with just that score the lowest id.

Probabilities are counted in whole numbers, `masses`. Their sums do not depend on the order they are added in, so the
kept set depends on neither the batch, the number of threads nor the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NEVER = float("-inf")

FAR = 64.0
"""A score this far below the largest has no mass, and neither has any below it."""

POWERS = 24204406.0
"""2^24 · log2(e) as a float32: a distance times this counts powers of two in units of 2^-24."""

SERIES = (2147483645, 1488521945, 515877823, 119165869, 20572593, 2739202, 234782)
"""Chebyshev interpolation of 2^-x on [0, 1], terms of alternating sign in units of 2^-31; off by less than 5e-9."""


def masses(scores: Tensor, top: Tensor) -> Tensor:
    """`exp(scores - top)` in units of 2^-40, int64, computed in whole numbers alone but for the first product.

    Args:
        scores: `[B, V]` float32.
        top: `[B, 1]` float32, the largest score of each row.
    """
    distance = top - scores
    power = (torch.where(distance < FAR, distance, FAR) * POWERS).to(torch.int64)
    fraction = (power & 0xFFFFFF) << 8
    mass = torch.full_like(power, SERIES[-1])
    for term in reversed(SERIES[:-1]):
        mass = term - ((mass * fraction) >> 32)
    return (mass << 9) >> (power >> 24).clamp(max=63)


def find_bounds(scores: Tensor, top_k: Tensor, tail: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """The bound of what each row keeps, for `keeps`.

    Args:
        scores: `[B, V]` float32.
        top_k: `[B]` int64, 0 keeps all.
        tail: `[B]` float32, 1 - top_p; 0 keeps all.
        least: `[B]` float32, log(min_p); -inf keeps all.

    Returns:
        `[B]` float32 scores and `[B]` int64 token ids.
    """
    width = scores.shape[-1]
    # A sort that is not stable would let the choice among equal tokens depend on the device and the batch.
    ranked, order = scores.sort(dim=-1, stable=True)
    top = ranked[:, -1:]
    count = torch.where(top_k > 0, top_k, width).clamp(max=width)
    out = ranked < ranked.gather(1, width - count[:, None])
    reached = masses(ranked, top).masked_fill(out, 0).cumsum(dim=-1)
    beyond = (tail.double() * reached[:, -1].double()).long()
    out |= (reached <= beyond[:, None]) & (tail > 0)[:, None]
    out |= ranked < top + least[:, None]
    out[:, -1] = False
    # What is left out stands first, so its number is the place of the bound.
    first = out.sum(dim=-1, keepdim=True)
    return ranked.gather(1, first)[:, 0], order.gather(1, first)[:, 0]


def keeps(scores: Tensor, bound: Tensor, edge: Tensor) -> Tensor:
    """Whether each score is kept, `[B, V]` bool; a score that is not a number is, so that it shows."""
    token = torch.arange(scores.shape[-1], device=scores.device)
    out = (scores < bound[:, None]) | ((scores == bound[:, None]) & (token < edge[:, None]))
    return ~out


def keep_likely(scores: Tensor, top_k: Tensor, tail: Tensor, least: Tensor) -> Tensor:
    """The scores, -inf where a token is left out; arguments as for `find_bounds`."""
    return scores.masked_fill(~keeps(scores, *find_bounds(scores, top_k, tail, least)), _NEVER)
