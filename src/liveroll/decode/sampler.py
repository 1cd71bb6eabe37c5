"""From logits to tokens: penalties, temperature, filters, one draw; greedy is a case of it.

The order is that of transformers: processors on the logits in fp32, then temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from liveroll.decode.noise import gumbel_noise
from liveroll.types import ResolvedSampling

_NEVER = float("-inf")


class Variant(Enum):
    """How much of the path a call needs."""

    GREEDY = "greedy"
    PLAIN = "plain"  # temperature alone
    FULL = "full"  # penalties, held stops and filters too

    @classmethod
    def of(cls, samplings: Iterable[ResolvedSampling]) -> Variant:
        """The least variant that serves all of these settings."""
        samplings = list(samplings)
        if any(_is_full(s) for s in samplings):
            return cls.FULL
        return cls.PLAIN if any(s.do_sample for s in samplings) else cls.GREEDY


def _is_full(sampling: ResolvedSampling) -> bool:
    filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    held = sampling.min_new_tokens > 0 and bool(sampling.stop_token_ids)
    return sampling.repetition_penalty != 1 or held or (sampling.do_sample and filtered)


@dataclass(frozen=True)
class Rows:
    """What sampling needs to know of B rows.

    Attributes:
        position: `[B]` int64, position of the token to be sampled.
        stream: `[B, 2]` int64 keys of the random streams.
        sampled: `[B]` bool, False takes the most likely token.
        temperature: `[B]` float32.
        top_k: `[B]` int64, 0 keeps all.
        tail: `[B]` float32, 1 - top_p; 0 keeps all.
        min_p: `[B]` float32.
        penalty: `[B]` float32 repetition penalty.
        seen: `[B, V]` bool, tokens of the history; None where no row has a penalty.
        stops: `[B, S]` int64 stop tokens, -1 for none.
        held: `[B]` bool, True where no stop token may be sampled yet.
    """

    position: Tensor
    stream: Tensor
    sampled: Tensor
    temperature: Tensor
    top_k: Tensor
    tail: Tensor
    min_p: Tensor
    penalty: Tensor
    seen: Tensor | None
    stops: Tensor
    held: Tensor


def sample(logits: Tensor, rows: Rows, variant: Variant) -> tuple[Tensor, Tensor]:
    """Draw one token a row.

    Args:
        logits: `[B, V]` of any float dtype.
        rows: the rows' settings.
        variant: how much of the path to run.

    Returns:
        `[B]` int64 tokens, and `[B]` float32 log-probabilities of them in the distribution they were drawn from.
    """
    if logits.is_cuda and variant is not Variant.FULL:
        from liveroll.kernels.draw import draw

        return draw(logits, rows.temperature, rows.sampled, rows.stream, rows.position)
    scores = logits.to(torch.float32)
    if variant is Variant.FULL:
        scores = penalise(scores, rows.seen, rows.penalty)
        scores = hold(scores, rows.stops, rows.held)
    if variant is not Variant.GREEDY:
        scores = scores / rows.temperature[:, None]
    if variant is Variant.FULL:
        scores = keep_likely(scores, rows.top_k, rows.tail, rows.min_p)
    # On the CPU a look at the rows costs nothing, and noise for a whole vocabulary a lot.
    if variant is Variant.GREEDY or not (scores.is_cuda or rows.sampled.any()):
        tokens = scores.argmax(dim=-1)
    else:
        noise = gumbel_noise(rows.stream, rows.position, scores.shape[-1])
        tokens = torch.where(rows.sampled[:, None], scores + noise, scores).argmax(dim=-1)
    chosen = scores.gather(1, tokens[:, None])[:, 0]
    return tokens, chosen - torch.logsumexp(scores, dim=-1)


def penalise(scores: Tensor, seen: Tensor | None, penalty: Tensor) -> Tensor:
    """Repetition penalty (Keskar et al. 2019, arXiv:1909.05858) of the tokens in the history."""
    if seen is None:
        return scores
    factor = penalty[:, None]
    return torch.where(seen, torch.where(scores < 0, scores * factor, scores / factor), scores)


def hold(scores: Tensor, stops: Tensor, held: Tensor) -> Tensor:
    """Exclude the stop tokens of rows that are still held."""
    excluded = scores.new_zeros(stops.shape).masked_fill(held[:, None] & (stops >= 0), _NEVER)
    return scores.scatter_add(1, stops.clamp(min=0), excluded)


def keep_likely(scores: Tensor, top_k: Tensor, tail: Tensor, min_p: Tensor) -> Tensor:
    """Exclude the tokens that top-k, then top-p, then min-p leave out.

    Ties at the k-th score are all kept. Top-p keeps a token while the probability of those before it is under p
    (Holtzman et al. 2020, arXiv:1904.09751), min-p while its own is at least that share of the largest
    (Nguyen et al. 2024, arXiv:2407.01082). Of equal tokens at the edge of top-p, those with the highest ids stay.
    """
    width = scores.shape[-1]
    # From the least likely on, as transformers does it: which of equal tokens stay depends on the direction. A sort
    # that is not stable would let it depend on the device and the size of the batch too.
    ranked, order = scores.sort(dim=-1, stable=True)
    kept = torch.where(top_k > 0, top_k, width).clamp(max=width)
    ranked = ranked.masked_fill(ranked < ranked.gather(1, width - kept[:, None]), _NEVER)
    probabilities = ranked.softmax(dim=-1)
    # At p = 1 nothing is left out, not even a token whose probability rounds to 0.
    out = (probabilities.cumsum(dim=-1) <= tail[:, None]) & (tail > 0)[:, None]
    out |= probabilities < min_p[:, None] * probabilities[:, -1:]
    out[:, -1] = False
    ranked = ranked.masked_fill(out, _NEVER)
    return torch.empty_like(scores).scatter_(1, order, ranked)
