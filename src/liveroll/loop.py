"""The loop `plan → run → commit` that every rollout is."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace

from transformers import PreTrainedModel

from liveroll.call import Call
from liveroll.config import RolloutConfig
from liveroll.cutoff import Cutoff
from liveroll.decode.decoder import Decoder
from liveroll.model.guard import ModelGuard
from liveroll.ordinary import run_ordinary
from liveroll.planning.routes import RoutePlan
from liveroll.routing import Router
from liveroll.scheduling.plan import Wait
from liveroll.scheduling.request import Request
from liveroll.scheduling.shares import Source
from liveroll.stage import Stage
from liveroll.stats import StatsRecorder


class RolloutLoop:
    """Runs calls, one after the other.

    Args:
        model: the model.
        config: the engine's.
        guard: puts the model into rollout mode.
        decoder: what decoding keeps from call to call.
        router: plans prefills.
    """

    def __init__(
        self, model: PreTrainedModel, config: RolloutConfig, guard: ModelGuard, decoder: Decoder, router: Router
    ) -> None:
        self._model = model
        self._config = config
        self._guard = guard
        self._fusion = decoder.fusion
        self._stage = Stage(model, config, guard, decoder, router)

    def takes_ordinary(self, call: Call) -> bool:
        """Whether a call that has something to run goes to `model.generate` on the ordinary route."""
        return bool(call.unfinished) and self._stage.takes_ordinary(call)

    def plan(self, call: Call) -> RoutePlan:
        """The routes that a call could take."""
        return self._stage.plan(call)

    def run(
        self, call: Call, ordinary: bool, cutoff: Cutoff, stats: StatsRecorder, source: Source | None = None
    ) -> Generator[list[Request]]:
        """Run a call: first the requests that had nothing to do, then after each step those that it finished.

        Args:
            call: the call.
            ordinary: whether it takes the ordinary route.
            cutoff: what ends its rows before their time.
            stats: takes note of what is done.
            source: gives the requests of the call that are run here, where others run the rest.
        """
        yield [request for request in call.requests if request.finish_reason is not None]
        if not call.unfinished:
            return
        if ordinary:
            slots = self._config.max_slots
            for part in [call] if source is None else _parts(call, source):
                yield from run_ordinary(self._model, part, slots, cutoff, stats.timeline, stats.record_chunk)
            return
        with self._fusion.reading():
            scheduler, runner = self._stage.set_up(call, source, stats)
            stats.timeline.enter("scheduling")
            while (plan := scheduler.plan()) is not None:
                waiting = isinstance(plan, Wait)
                if not isinstance(plan, Wait):
                    runner.launch(plan)
                for done, result in runner.collect(everything=waiting):
                    stats.timeline.enter("scheduling")
                    yield scheduler.commit(done, result)
                    if due := cutoff.due(scheduler.sampled):
                        yield scheduler.abort(due)
                stats.timeline.enter("scheduling")

    @contextmanager
    def mode(self, ordinary: bool) -> Iterator[None]:
        """Rollout mode, in which `run` is advanced."""
        with self._guard.rollout():
            if ordinary:
                yield
            else:
                with self._guard.our_attention():
                    yield


def _parts(call: Call, source: Source) -> Iterator[Call]:
    """The requests that a source gives, a call of their own each time."""
    while requests := source():
        yield replace(call, requests=tuple(requests))
