"""The statistics of a call, gathered from those who know them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from liveroll.decode.decoder import Decoder
from liveroll.decode.runner import StepRunner
from liveroll.ordinary import OrdinaryCounts
from liveroll.profile import RolloutProfile
from liveroll.scheduling.pages import PageAllocator
from liveroll.scheduling.request import Request
from liveroll.scheduling.scheduler import Scheduler
from liveroll.timeline import RecordedTimeline, Timeline
from liveroll.types import RolloutStats


class StatsRecorder:
    """Collects what a call did, from its beginning to `finish`.

    Args:
        timeline: of the call; a recorded one makes a profile.
        max_slots: rows that a decode step can have.
    """

    def __init__(self, timeline: Timeline, max_slots: int) -> None:
        self.timeline = timeline
        self._max_slots = max_slots
        self._fallback_reason: str | None = None
        self._sources: tuple[Scheduler, PageAllocator, StepRunner, Decoder] | None = None
        self._before = (Counter[str](), Counter[str]())
        self._chunks: list[OrdinaryCounts] = []
        self._waited = 0.0

    def watch(self, scheduler: Scheduler, allocator: PageAllocator, runner: StepRunner, decoder: Decoder) -> None:
        """Read the counts of these when the call ends."""
        self._sources = (scheduler, allocator, runner, decoder)
        self._before = (decoder.graphs.captures.copy(), decoder.graphs.replays.copy())

    def record_chunk(self, counts: OrdinaryCounts) -> None:
        """Add a chunk that went to `model.generate`."""
        self._chunks.append(counts)

    def record_fallback(self, reason: str) -> None:
        """Note that the whole call went to `model.generate`, and why."""
        self._fallback_reason = reason

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside the block as spent waiting for other ranks."""
        started = time.perf_counter()
        yield
        self._waited += time.perf_counter() - started

    def finish(self, prompts: int, requests: Sequence[Request], kv_bytes: int) -> RolloutStats:
        """The statistics of the call, which ends now; `requests` are those that were run here."""
        routes: dict[str, int] = {"ordinary": len(self._chunks)} if self._chunks else {}
        tokens = sum(chunk.prefill_tokens for chunk in self._chunks)
        padded = sum(chunk.padded_tokens for chunk in self._chunks)
        steps = sum(chunk.decode_steps for chunk in self._chunks)
        new = [request.new for request in requests]
        new_tokens, first_tokens = sum(new), len(new) - new.count(0)
        shared = preemptions = peak = 0
        cascade_steps = 0
        captures, replays = Counter[str](), Counter[str]()
        eager_reason = prefill_eager_reason = uncompiled_reason = None
        if self._sources is not None:
            scheduler, allocator, runner, decoder = self._sources
            counts = runner.prefill_counts
            routes, tokens, padded = dict(counts.routes), counts.tokens, counts.padded
            shared, cascade_steps = scheduler.shared_tokens, runner.cascade_steps
            steps, preemptions, peak = runner.decode_steps, scheduler.preemptions, allocator.peak
            captures = decoder.graphs.captures - self._before[0]
            replays = decoder.graphs.replays - self._before[1]
            eager_reason, prefill_eager_reason = decoder.steps.eager_reason, decoder.prefill.eager_reason
            uncompiled_reason = decoder.steps.forward.uncompiled_reason or decoder.prefill.forward.uncompiled_reason
            first_tokens = runner.prefilled_rows
        forwards = sum(routes.values())
        seconds = self.timeline.finish()
        return RolloutStats(
            route="generate" if self._fallback_reason is not None else next(iter(routes), "none"),
            fallback_reason=self._fallback_reason,
            prompts=prompts,
            new_tokens=new_tokens,
            prefill_forwards=forwards,
            prefill_routes=routes,
            prefill_tokens=tokens,
            padded_tokens=padded,
            shared_tokens=shared,
            decode_steps=steps,
            preemptions=preemptions,
            peak_pages=peak,
            kv_bytes=kv_bytes,
            captures=captures["decode"],
            replays=replays["decode"],
            cascade_steps=cascade_steps,
            prefill_captures=captures["prefill"],
            prefill_replays=replays["prefill"],
            eager_reason=eager_reason,
            prefill_eager_reason=prefill_eager_reason,
            uncompiled_reason=uncompiled_reason,
            seconds=seconds,
            waited_seconds=self._waited,
            profile=self._profile(forwards, steps, new_tokens, new_tokens - first_tokens),
        )

    def _profile(self, forwards: int, steps: int, new_tokens: int, decoded: int) -> RolloutProfile | None:
        timeline = self.timeline
        if not isinstance(timeline, RecordedTimeline):
            return None
        ms = {part: seconds * 1e3 for part, seconds in timeline.seconds.items()}
        return RolloutProfile(
            intake_ms=ms["intake"],
            planning_ms=ms["planning"],
            scheduling_ms=ms["scheduling"],
            cache_ms=ms["cache"],
            capture_ms=ms["capture"],
            prefill_ms=ms["prefill"],
            decode_ms=ms["decode"],
            postprocessing_ms=ms["postprocessing"],
            prefill_device_ms=timeline.device_ms("prefill"),
            decode_device_ms=timeline.device_ms("decode"),
            prefill_forwards=forwards,
            decode_forwards=steps,
            productive_tokens=new_tokens,
            active_capacity=max(decoded, 0) if steps else 0,
            configured_capacity=self._max_slots * steps,
        )
