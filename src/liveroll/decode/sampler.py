"""From logits to tokens: biases, penalties, temperature, filters, one draw; greedy is a case of it.

The order is that of transformers, in fp32: logit biases, repetition penalty, presence and frequency penalties,
forbidden and held tokens, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from liveroll.decode.noise import gumbel_noise
from liveroll.decode.state import IN_RESPONSE, Column, RowState, Setting
from liveroll.decode.truncation import find_bounds, keeps
from liveroll.scheduling.details import NOTHING, Wanted
from liveroll.types import ResolvedSampling

_NEVER = float("-inf")


class Variant(Enum):
    """How much of the path a call needs."""

    GREEDY = "greedy"
    PLAIN = "plain"  # temperature alone
    FULL = "full"  # everything

    @classmethod
    def of(cls, samplings: Iterable[ResolvedSampling]) -> Variant:
        """The least variant that serves all of these settings."""
        samplings = list(samplings)
        if any(_is_full(s) for s in samplings):
            return cls.FULL
        return cls.PLAIN if any(s.do_sample for s in samplings) else cls.GREEDY


def _is_full(sampling: ResolvedSampling) -> bool:
    penalised = sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
    held = sampling.min_new_tokens > 0 and sampling.stop_token_ids
    adjusted = sampling.logit_bias or sampling.forbidden_tokens or sampling.first_forbidden_tokens
    return bool(sampling.truncates or penalised or held or adjusted)


@dataclass(frozen=True)
class Drawn:
    """What was drawn for B rows.

    Attributes:
        tokens: `[B]` int64.
        logprobs: `[B]` float32, in the distribution drawn from.
        details: `[wanted.rows, B]` int32, as `Details` holds them; None where nothing is wanted.
    """

    tokens: Tensor
    logprobs: Tensor
    details: Tensor | None


def sample(logits: Tensor, state: RowState, slots: Tensor, variant: Variant, wanted: Wanted = NOTHING) -> Drawn:
    """Draw one token a row.

    Args:
        logits: `[B, V]` of any float dtype.
        state: the settings and histories of slots.
        slots: `[B]` int64, the slot of each row.
        variant: how much of the path to run.
        wanted: what to report besides tokens and log-probabilities.
    """
    if logits.is_cuda:
        from liveroll.kernels.sample import sample_fused

        return sample_fused(logits, state, slots, variant, wanted)
    scores = logits[:, : state.sampled_size].to(torch.float32)
    numbers, settings = state.numbers[slots], state.settings[slots]
    if variant is Variant.FULL:
        scores = adjust(scores, state, slots, numbers[:, Column.DONE], settings)
    if variant is not Variant.GREEDY:
        scores = scores * settings[:, Setting.SHARPNESS, None]
    # A look at the rows costs nothing here, and a sort or noise for a whole vocabulary a lot.
    if variant is Variant.FULL and _truncate(numbers, settings):
        limits = numbers[:, Column.TOP_K], settings[:, Setting.TAIL], settings[:, Setting.LEAST]
        scores = scores.masked_fill(~keeps(scores, *find_bounds(scores, *limits)), _NEVER)
    sampled = numbers[:, Column.SAMPLED] != 0
    if sampled.any():
        stream = numbers[:, Column.STREAM_LOW : Column.STREAM_HIGH + 1]
        noise = gumbel_noise(stream, numbers[:, Column.POSITION] + 1, scores.shape[-1])
        tokens = torch.where(sampled[:, None], scores + noise, scores).argmax(dim=-1)
    else:
        tokens = scores.argmax(dim=-1)
    total = torch.logsumexp(scores, dim=-1)
    logprobs = scores.gather(1, tokens[:, None])[:, 0] - total
    return Drawn(tokens, logprobs, _details(logits, scores, total, tokens, wanted) if wanted.rows else None)


def adjust(scores: Tensor, state: RowState, slots: Tensor, done: Tensor, settings: Tensor) -> Tensor:
    """Biases, penalties and exclusions.

    Args:
        scores: `[B, V]` float32.
        state: has the adjusted tokens and histories of slots.
        slots: `[B]` int64.
        done: `[B]` int64, tokens of each response so far.
        settings: `[B, len(Setting)]` float32.
    """
    scores = add_bias(scores, state.adjusted[slots], state.bias[slots], state.until[slots] > done[:, None])
    repetition, presence, frequency = (settings[:, s] for s in _PENALTIES)
    if state.history is None or not ((repetition != 1) | (presence != 0) | (frequency != 0)).any():
        return scores
    return penalise(scores, state.history[slots][:, : scores.shape[1]], repetition, presence, frequency)


_PENALTIES = (Setting.REPETITION, Setting.PRESENCE, Setting.FREQUENCY)


def add_bias(scores: Tensor, tokens: Tensor, bias: Tensor, excluded: Tensor) -> Tensor:
    """Add to the scores of some tokens, or exclude them.

    Args:
        scores: `[B, V]` float32.
        tokens: `[B, W]` int32 token ids, each once in a row; those that are V or more are passed over.
        bias: `[B, W]` float32.
        excluded: `[B, W]` bool.
    """
    width = scores.shape[1]
    amount = torch.where(excluded, _NEVER, bias).masked_fill(tokens >= width, 0.0)
    return scores.scatter_add(1, tokens.clamp(max=width - 1).long(), amount)


def penalise(scores: Tensor, history: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Penalties for tokens that are there already.

    The repetition penalty (Keskar et al. 2019, arXiv:1909.05858) is for tokens of prompt and response. The others are
    those of the OpenAI API, for tokens of the response alone, in the order of vLLM: after the repetition penalty.

    Args:
        scores: `[B, V]` float32.
        history: `[B, V]` int32, what `RowState` counts.
        repetition: `[B]` float32.
        presence: `[B]` float32.
        frequency: `[B]` float32.
    """
    factor = repetition[:, None]
    scores = torch.where(history > 0, torch.where(scores < 0, scores * factor, scores / factor), scores)
    times = history // IN_RESPONSE
    scores = scores - times * frequency[:, None]
    return scores - (times > 0) * presence[:, None]


def _truncate(numbers: Tensor, settings: Tensor) -> bool:
    """Whether some row leaves likely tokens out."""
    limited = (numbers[:, Column.TOP_K] > 0) | (settings[:, Setting.TAIL] > 0) | (settings[:, Setting.LEAST] > _NEVER)
    return bool(limited.any())


def _details(logits: Tensor, scores: Tensor, total: Tensor, tokens: Tensor, wanted: Wanted) -> Tensor:
    """Details `[wanted.rows, B]` of drawn tokens: from raw logits, and from the scores drawn from and their log-sum."""
    parts: list[Tensor] = []
    if wanted.raw:
        raw = logits.to(torch.float32)
        chosen = raw.gather(1, tokens[:, None])[:, 0] - torch.logsumexp(raw, dim=-1)
        parts.append(chosen.view(torch.int32)[None])
    width = scores.shape[1]
    if wanted.top:
        # Equal tokens in the order of their ids.
        found = scores.sort(dim=-1, descending=True, stable=True)
        missing = wanted.top - min(wanted.top, width)
        ids = torch.nn.functional.pad(found.indices[:, : wanted.top].int(), (0, missing))
        likely = found.values[:, : wanted.top] - total[:, None]
        values = torch.nn.functional.pad(likely, (0, missing), value=_NEVER)
        parts += [ids.T, values.view(torch.int32).T]
    if wanted.kept:
        kept = scores > _NEVER
        ids = torch.where(kept, torch.arange(width, device=kept.device), width).sort(dim=-1).values[:, : wanted.kept]
        ids = torch.nn.functional.pad(ids, (0, wanted.kept - ids.shape[1]))
        parts += [kept.sum(dim=-1, dtype=torch.int32)[None], ids.int().T]
    return torch.cat(parts)
