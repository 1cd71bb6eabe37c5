"""The ordinary route: the padded batch handed to `model.generate`, one chunk of slots at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

from liveroll.call import Call
from liveroll.cutoff import Cutoff
from liveroll.decode.adjustments import most_adjusted
from liveroll.decode.advance import advance
from liveroll.decode.sampler import Variant
from liveroll.decode.state import Column, RowState
from liveroll.errors import LogitsError
from liveroll.model.generate_arguments import own_generate, to_generation_config
from liveroll.model.versions import prepared_for_generate
from liveroll.scheduling.details import Wanted
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
    """Ends a row when its budget is spent, at a stop token or string, or when the call cuts it off."""

    def __init__(
        self,
        state: RowState,
        sampling: _Sampling,
        requests: Sequence[Request],
        search: StopSearch | None,
        cutoff: Cutoff,
        sampled: int,
        timeline: Timeline,
    ) -> None:
        self._state = state
        self._timeline = timeline
        self._sampling = sampling
        self._search = search
        self._cutoff = cutoff
        self._sampled = sampled
        self._requests = requests
        self._texts = {row: request.tokens.tolist() for row, request in enumerate(requests) if request.sampling.stop}

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if len(self._sampling.reports) == 1:
            self._timeline.launched()
            self._timeline.wait()
            self._timeline.launch("decode")
        if not (self._texts or self._cutoff.counts_tokens):
            self._sampled += 1  # that there are some is all that matters
        else:
            tokens, outcomes = self._sampling.reports[-1][:2].cpu().numpy()
            live = outcomes != Outcome.IDLE
            self._sampled += int(live.sum())
            for row in [row for row in self._texts if live[row]]:
                self._texts[row].append(int(tokens[row]))
                self._look_for_stop(row)
        for request in self._cutoff.due(self._sampled):
            if request.slot is None:
                request.finish_reason = "aborted"
            else:
                self._end(request.slot)
        return self._state.numbers[: self._state.slots, Column.REMAINING] <= 0

    def _look_for_stop(self, row: int) -> None:
        request = self._requests[row]
        if self._search is not None and (found := self._search(request, np.array(self._texts[row]))):
            request.stop = found
            self._end(row)

    def _end(self, row: int) -> None:
        self._state.numbers[row, Column.REMAINING] = 0


def run_ordinary(
    model: PreTrainedModel,
    call: Call,
    slots: int,
    cutoff: Cutoff,
    timeline: Timeline,
    record: Callable[[OrdinaryCounts], None],
) -> Iterator[list[Request]]:
    """Generate for the unfinished requests of a call, one chunk after the other; the requests that each finished.

    Args:
        model: in rollout mode, with its own attention, whenever the iterator is advanced.
        call: the call.
        slots: requests in a chunk, at most.
        cutoff: what ends rows before their time.
        timeline: of the call.
        record: takes what each chunk ran.
    """
    sampled = 0
    while waiting := call.unfinished:
        if due := cutoff.due(sampled):
            for request in due:
                request.finish_reason = "aborted"
            yield due
            continue
        chunk = waiting[:slots]
        record(_run_chunk(model, call, chunk, cutoff, sampled, timeline))
        sampled += sum(request.new for request in chunk)
        yield [request for request in waiting if request.finish_reason is not None]


def _run_chunk(
    model: PreTrainedModel,
    call: Call,
    requests: Sequence[Request],
    cutoff: Cutoff,
    sampled: int,
    timeline: Timeline,
) -> OrdinaryCounts:
    timeline.enter("cache")
    variant, wanted = Variant.of(call.settings), Wanted.of(call.settings)
    device = model.device
    contexts = [request.context for request in requests]
    width = max(map(len, contexts))
    ids = np.full((len(requests), width), requests[0].sampling.pad_token_id, np.int64)
    mask = np.zeros_like(ids)
    for row, (request, context) in enumerate(zip(requests, contexts, strict=True)):
        start = width - len(context)
        ids[row, start:], mask[row, start:] = context, 1
        request.slot = row
    state = RowState(
        len(requests),
        table_width=1,
        stop_width=max(len(request.sampling.stop_token_ids) for request in requests),
        adjusted_width=max(1, most_adjusted(request.sampling for request in requests)),
        vocab_size=model.config.get_text_config().vocab_size,
        sampled_size=call.sampled_size,
        device=device,
    )
    if variant is Variant.FULL:
        state.keep_histories()
    state.admit(requests)
    sampling = _Sampling(state, variant, wanted)
    # All that is left to `generate` is to take the one token that the sampler leaves it.
    bare = replace(
        requests[0].sampling,
        max_new_tokens=max(request.left for request in requests),
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
        own_generate(model)(
            torch.from_numpy(ids).to(device),
            synced_gpus=False,  # `in_step` sees to it, in subgroups too
            attention_mask=torch.from_numpy(mask).to(device),
            logits_processor=LogitsProcessorList([sampling]),
            stopping_criteria=StoppingCriteriaList(
                [_Ended(state, sampling, requests, call.search_stop, cutoff, sampled, timeline)]
            ),
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
        logprobs = bits[:count, row].copy().view(np.float32)
        if np.isnan(logprobs).any():
            raise LogitsError(logits_complaint(request))
        request.tokens = np.concatenate([request.tokens, tokens[:count, row].astype(np.int64)])
        request.logprobs = np.concatenate([request.logprobs, logprobs])
        request.details = wanted.read(reports[3:, :count, row])
        request.slot = None
        last = outcomes[count - 1, row]
        if request.stop is not None:
            request.finish_reason = "stop"
        elif last == Outcome.STOPPED:
            request.finish_reason, request.stop = "stop", int(request.tokens[-1])
        else:
            request.finish_reason = "length" if last == Outcome.SPENT else "aborted"
