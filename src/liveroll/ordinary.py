"""The ordinary route: the padded batch handed to `model.generate`, one chunk of slots at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from liveroll.decode.adjustments import most_adjusted
from liveroll.decode.advance import advance
from liveroll.decode.sampler import Variant
from liveroll.decode.state import Column, RowState
from liveroll.errors import LogitsError
from liveroll.model.generation import to_generation_config
from liveroll.model.versions import prepared_for_generate
from liveroll.scheduling.details import NOTHING, Wanted
from liveroll.scheduling.plan import Outcome
from liveroll.scheduling.request import Request, logits_complaint
from liveroll.scheduling.scheduler import StopSearch
from liveroll.timeline import Timeline


@dataclass
class OrdinaryCounts:
    """What a chunk handed to `model.generate` ran."""

    prefill_tokens: int
    padded_tokens: int
    decode_steps: int


class _Sampling(LogitsProcessor):  # type: ignore[misc]
    """Samples with the engine's own sampler and leaves `generate` only that token to choose.

    So the route draws the tokens that every other route draws, from the same streams, with per-row settings.
    """

    def __init__(self, state: RowState, variant: Variant, wanted: Wanted) -> None:
        self._state = state
        self._variant = variant
        self._wanted = wanted
        self._slots = torch.arange(state.slots, device=state.numbers.device)
        self.reports: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        report = advance(self._state, self._slots, scores, self._variant, self._wanted)
        self.reports.append(report)
        chosen = torch.full_like(scores, float("-inf"))
        return chosen.scatter_(1, report[0].long()[:, None], 0.0)


class _Ended(StoppingCriteria):  # type: ignore[misc]
    """Ends a row when its budget is spent, or at a stop token or string."""

    def __init__(
        self,
        state: RowState,
        sampling: _Sampling,
        requests: Sequence[Request],
        search: StopSearch | None,
        timeline: Timeline,
    ) -> None:
        self._state = state
        self._timeline = timeline
        self._sampling = sampling
        self._search = search
        self._watched = [(row, r) for row, r in enumerate(requests) if r.sampling.stop]

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if len(self._sampling.reports) == 1:
            self._timeline.launched()
            self._timeline.wait()
            self._timeline.launch("decode")
        if self._watched and self._search is not None:
            reports = torch.stack([report[:2] for report in self._sampling.reports], dim=1).cpu().numpy()
            tokens, outcomes = reports.astype(np.int64)
            for row, request in self._watched:
                live = outcomes[-1, row] != Outcome.IDLE
                if live and (found := self._search(request, tokens[:, row])):
                    request.stop = found
                    self._state.numbers[row, Column.REMAINING] = 0
        return self._state.numbers[: self._state.slots, Column.REMAINING] <= 0


def run_ordinary(
    model: PreTrainedModel,
    requests: Sequence[Request],
    variant: Variant,
    search: StopSearch | None,
    timeline: Timeline,
    *,
    wanted: Wanted = NOTHING,
    sampled_size: int | None = None,
) -> OrdinaryCounts:
    """Generate for one chunk of requests and finish them all.

    Args:
        model: in rollout mode, with its own attention.
        requests: at most as many as fit one batch.
        variant: how much of sampling to run.
        search: finds stop strings.
        timeline: of the call.
        wanted: what to tell of each token besides its log-probability.
        sampled_size: ids below this may be sampled; all of them if None.
    """
    timeline.enter("cache")
    device = model.device
    width = max(len(request.prompt) for request in requests)
    ids = np.full((len(requests), width), requests[0].sampling.pad_token_id, np.int64)
    mask = np.zeros_like(ids)
    for row, request in enumerate(requests):
        start = width - len(request.prompt)
        ids[row, start:], mask[row, start:] = request.prompt, 1
        request.slot = row
    state = RowState(
        len(requests),
        table_width=1,
        stop_width=max(len(request.sampling.stop_token_ids) for request in requests),
        adjusted_width=max(1, most_adjusted(request.sampling for request in requests)),
        vocab_size=model.config.get_text_config().vocab_size,
        sampled_size=sampled_size,
        device=device,
    )
    if variant is Variant.FULL:
        state.keep_histories()
    state.admit(requests)
    sampling = _Sampling(state, variant, wanted)
    # All that is left to `generate` is to take the one token that the sampler leaves it.
    bare = replace(
        requests[0].sampling,
        max_new_tokens=max(request.sampling.max_new_tokens for request in requests),
        min_new_tokens=0,
        n=1,
        do_sample=False,
        repetition_penalty=1.0,
        logit_bias=(),
        forbidden_tokens=(),
        first_forbidden_tokens=(),
        stop_token_ids=(),
    )
    timeline.launch("prefill")
    with prepared_for_generate(model, to_generation_config(bare)):
        model.generate(
            torch.from_numpy(ids).to(device),
            attention_mask=torch.from_numpy(mask).to(device),
            logits_processor=LogitsProcessorList([sampling]),
            stopping_criteria=StoppingCriteriaList([_Ended(state, sampling, requests, search, timeline)]),
        )
    timeline.launched()
    reports = torch.stack(sampling.reports, dim=1).cpu().numpy()
    timeline.enter("postprocessing")
    _finish(requests, reports, wanted)
    return OrdinaryCounts(ids.size, int(ids.size - mask.sum()), reports.shape[1] - 1)


def _finish(requests: Sequence[Request], reports: np.ndarray, wanted: Wanted) -> None:
    """Give requests what `[3 + wanted.rows, steps, rows]` reports say of them."""
    tokens, outcomes, bits = reports[:3]
    for row, request in enumerate(requests):
        count = int((outcomes[:, row] != Outcome.IDLE).sum())
        if np.isnan(bits[:count, row].copy().view(np.float32)).any():
            raise LogitsError(logits_complaint(request))
        request.tokens = tokens[:count, row].astype(np.int64)
        request.logprobs = bits[:count, row].copy().view(np.float32)
        request.details = wanted.read(reports[3:, :count, row])
        request.slot = None
        if request.stop is not None:
            request.finish_reason = "stop"
        elif outcomes[count - 1, row] == Outcome.STOPPED:
            request.finish_reason, request.stop = "stop", int(request.tokens[-1])
        else:
            request.finish_reason = "length"
