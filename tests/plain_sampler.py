"""The distribution a token is drawn from, written out step by step in Python's own numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from liveroll.types import ResolvedSampling

NEVER = -math.inf


def plain_scores(
    logits: Sequence[float],
    prompt: Sequence[int],
    response: Sequence[int],
    sampling: ResolvedSampling,
    size: int | None = None,
) -> list[float]:
    """The scores of all tokens before any is left out by top-k, top-p or min-p; -inf where one is forbidden."""
    scores = list(logits)
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in {*prompt, *response}:
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    for token, count in Counter(response).items():
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    forbidden = [*sampling.forbidden_tokens, *range(len(scores) if size is None else size, len(scores))]
    if not response:
        forbidden += sampling.first_forbidden_tokens
    if len(response) < sampling.min_new_tokens:
        forbidden += sampling.stop_token_ids
    for token in forbidden:
        scores[token] = NEVER
    return [score / sampling.temperature for score in scores] if sampling.do_sample else scores


def plain_kept(scores: Sequence[float], sampling: ResolvedSampling) -> tuple[set[int], float]:
    """The tokens that top-k, top-p and min-p keep, and by how much top-p decided at its closest."""
    if not sampling.do_sample:
        return {token for token, score in enumerate(scores) if score > NEVER}, math.inf
    order = sorted(range(len(scores)), key=lambda token: (scores[token], token), reverse=True)
    order = [token for token in order if scores[token] > NEVER]
    if 0 < sampling.top_k < len(order):
        order = [token for token in order if scores[token] >= scores[order[sampling.top_k - 1]]]
    top = scores[order[0]]
    masses = [math.exp(scores[token] - top) for token in order]
    kept, margin, before = [], math.inf, 0.0
    for token, mass in zip(order, masses, strict=True):
        share = before / math.fsum(masses)
        if sampling.top_p < 1:
            margin = min(margin, abs(share - sampling.top_p))
        if not kept or sampling.top_p == 1 or share < sampling.top_p:
            kept.append(token)
        before += mass
    if sampling.min_p > 0:
        kept = [token for token in kept if scores[token] >= top + math.log(sampling.min_p)]
    return set(kept), margin


def plain_logprobs(scores: Sequence[float], kept: set[int]) -> list[float]:
    """The log-probability of every token, -inf of those that are not kept."""
    top = max(scores[token] for token in kept)
    total = top + math.log(math.fsum(math.exp(scores[token] - top) for token in kept))
    return [score - total if token in kept else NEVER for token, score in enumerate(scores)]


@torch.no_grad()
def plain_greedy(
    model: PreTrainedModel, prompt: Sequence[int], sampling: ResolvedSampling, size: int | None = None
) -> list[int]:
    """The greedy response to a prompt: one forward over everything for each token."""
    response: list[int] = []
    while len(response) < sampling.max_new_tokens and not (response and response[-1] in sampling.stop_token_ids):
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, -1].tolist()
        scores = plain_scores(logits, prompt, response, sampling, size)
        response.append(scores.index(max(scores)))
    return response
