"""A call over the ranks of a group: they bring their prompts together, share the work, and give back what is whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from liveroll.call import Call
from liveroll.completion import FinishReason
from liveroll.config import RolloutConfig
from liveroll.cutoff import Cutoff, Limits
from liveroll.decode.decoder import Decoder
from liveroll.distributed.agreement import check_agreement
from liveroll.distributed.control import Control
from liveroll.distributed.exchange import gather_objects, swap_objects
from liveroll.distributed.queue import SharedQueue
from liveroll.distributed.subjects import engine_subjects, sampling_subjects
from liveroll.errors import ConfigError, PromptError
from liveroll.intake import Given, Intake, Sampling, join_given
from liveroll.loop import RolloutLoop
from liveroll.progress import completion_progress
from liveroll.results import make_batch
from liveroll.sampling_config import SamplingConfig
from liveroll.scheduling.admission import order_of_admission, refill_of
from liveroll.scheduling.details import Details
from liveroll.scheduling.request import Request
from liveroll.scheduling.shares import Deal, deal
from liveroll.stats import StatsRecorder
from liveroll.types import RolloutBatch

Gather = Literal["own", "all"]


@dataclass(frozen=True)
class _Brought:
    """What a rank brings to a call.

    Attributes:
        given: its prompts and their settings.
        subjects: what all must have in common.
        calls: calls that its engine made before.
        slots: rows that it runs side by side.
    """

    given: Given
    subjects: dict[str, str]
    calls: int
    slots: int


@dataclass(frozen=True)
class _Response:
    """What became of the request of a row."""

    row: int
    tokens: np.ndarray
    logprobs: np.ndarray
    details: Details | None
    finish_reason: FinishReason
    stop: int | str | None


class GroupRollout:
    """Runs calls over groups, one after the other.

    Args:
        model: the model.
        config: the engine's.
        tokenizer: the engine's, or None.
        intake: makes the calls.
        loop: runs this rank's part of each.
        decoder: what decoding keeps from call to call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: RolloutConfig,
        tokenizer: Any,
        intake: Intake,
        loop: RolloutLoop,
        decoder: Decoder,
    ) -> None:
        self._model = model
        self._config = config
        self._tokenizer = tokenizer
        self._intake = intake
        self._loop = loop
        self._decoder = decoder

    def run(
        self,
        group: ProcessGroup,
        control: Control,
        given: Given,
        sampling: Sampling | None,
        gather: Gather,
        stats: StatsRecorder,
    ) -> RolloutBatch:
        """Run the part of a call that is this rank's.

        Args:
            group: more than one rank.
            control: of the call.
            given: this rank's prompts, perhaps none.
            sampling: their settings, as they were given.
            gather: whose completions to return, as it was given.
            stats: takes note of what is done here.

        Raises:
            RankError: the ranks disagree, or another one failed.
            LiverollError: whatever `generate` raises.
        """
        if given.prompts.prompts:
            self._intake.draft(given)  # so that what is wrong is told of this rank's own prompts
        brought = self._bring(group, control, given, sampling, gather)
        joined = join_given([entry.given for entry in brought], self._intake.padding_token)
        if not joined.prompts.prompts:
            raise PromptError("no rank of the group has a prompt")
        call = self._intake.open(joined, before=max(entry.calls for entry in brought))
        counts = [len(entry.given.prompts.prompts) for entry in brought]
        owners = np.repeat(np.arange(control.ranks), counts)
        finished_here = self._run_share(call, owners, control, min(entry.slots for entry in brought), stats)
        with stats.waiting():
            control.meet("end")
        everything = gather == "all"
        self._exchange(call, finished_here, None if everything else owners, control.rank, group)
        requests: Sequence[Request] = call.requests
        settings, prompts = call.sampling, joined.prompts
        if not everything:
            requests = _own(call, owners, control.rank)
            settings = tuple(entry for entry, owner in zip(settings, owners, strict=True) if owner == control.rank)
            prompts = given.prompts
        finish = partial(stats.finish, len(given.prompts.prompts), finished_here, self._decoder.kv_bytes)
        return make_batch(requests, prompts, settings, finish, self._tokenizer, self._model.device)

    def _bring(
        self, group: ProcessGroup, control: Control, given: Given, sampling: Sampling | None, gather: Gather
    ) -> list[_Brought]:
        """What every rank brings, once all are here and found to agree."""
        subjects = engine_subjects(self._model, self._config, self._intake.vocabulary, self._tokenizer)
        subjects["gather"] = repr(gather)
        # Whoever gives a list means settings by prompt, and whoever has no prompt means none.
        if given.prompts.prompts and (sampling is None or isinstance(sampling, SamplingConfig)):
            subjects |= sampling_subjects(sampling)
        own = _Brought(given, subjects, self._intake.calls, self._config.max_slots)
        control.meet("start")
        brought: list[_Brought] = gather_objects(own, group, self._model.device)
        check_agreement([entry.subjects for entry in brought])
        return brought

    def _run_share(
        self, call: Call, owners: np.ndarray, control: Control, slots: int, stats: StatsRecorder
    ) -> list[Request]:
        """Run this rank's share of a call; the requests that it finished."""
        unfinished = order_of_admission(call.unfinished)
        if self._config.balance == "static":
            hands: list[list[Request]] = [[] for _ in range(control.ranks)]
            for request in unfinished:
                hands[owners[request.prompt_index]].append(request)
            shares = Deal(tuple(map(tuple, hands)))
        else:
            slots = min(slots, max(1, len(unfinished)))
            shares = deal(unfinished, control.ranks, slots, refill_of(slots))
        stats.timeline.enter("planning")
        ordinary = self._loop.takes_ordinary(call)
        stats.timeline.enter("intake")
        source, cutoff = SharedQueue(control, shares), Cutoff(call.requests, Limits(), control.beat)
        with (
            self._loop.mode(ordinary),
            completion_progress(len(call.requests), self._config.progress) as tick,
        ):
            for finished in self._loop.run(call, ordinary, cutoff, stats, source):
                tick(finished)
        stats.timeline.enter("postprocessing")
        return [request for request in unfinished if request.finish_reason is not None]

    def _exchange(
        self,
        call: Call,
        finished_here: Sequence[Request],
        owners: np.ndarray | None,
        rank: int,
        group: ProcessGroup,
    ) -> None:
        """Give each response to the rank whose prompt it answers, or to all where there are no owners."""
        device = self._model.device
        if owners is None:
            mine = [_response(request) for request in finished_here]
            coming = gather_objects(mine, group, device)
        else:
            going: list[list[_Response]] = [[] for _ in range(group.size())]
            for request in finished_here:
                owner = owners[request.prompt_index]
                if owner != rank:
                    going[owner].append(_response(request))
            coming = swap_objects(going, group, device)
        for response in (response for responses in coming for response in responses):
            request = call.requests[response.row]
            request.tokens, request.logprobs, request.details = response.tokens, response.logprobs, response.details
            request.finish_reason, request.stop = response.finish_reason, response.stop


def check_gather(gather: Any) -> None:
    """Raise ConfigError unless it says whose completions to return."""
    if gather not in get_args(Gather):
        raise ConfigError(f"gather must be 'own' or 'all', not {gather!r}")


def _own(call: Call, owners: np.ndarray, rank: int) -> list[Request]:
    """The requests of a rank's own prompts, numbered as it gave them."""
    first = int((owners < rank).sum())
    own = [request for request in call.requests if owners[request.prompt_index] == rank]
    return [replace(request, row=row, prompt_index=request.prompt_index - first) for row, request in enumerate(own)]


def _response(request: Request) -> _Response:
    assert request.finish_reason is not None
    return _Response(
        request.row, request.tokens, request.logprobs, request.details, request.finish_reason, request.stop
    )
