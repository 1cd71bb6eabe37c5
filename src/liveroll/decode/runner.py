"""Step plans carried out on the device, a few steps ahead of their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from liveroll.decode.advance import advance
from liveroll.decode.decoder import Decoder
from liveroll.decode.sampler import Variant
from liveroll.decode.upload import upload
from liveroll.planning.prefill import PrefillPlanner
from liveroll.prefill.logits import PromptLogits
from liveroll.prefill.runner import PrefillCounts, PrefillRunner
from liveroll.scheduling.details import NOTHING, Wanted
from liveroll.scheduling.plan import DecodeStep, PrefillStep, StepPlan, StepResult
from liveroll.scheduling.scheduler import Scheduler
from liveroll.timeline import Timeline


@dataclass(frozen=True)
class _Launched:
    """A step whose report is on its way to the host."""

    plan: StepPlan
    report: Tensor
    arrived: torch.cuda.Event | None


class StepRunner:
    """Runs the steps of one call; the only place that reads from the device, once a step.

    Args:
        decoder: runs decode steps.
        prefill: runs prefill forwards.
        scheduler: has the pages of every slot.
        variant: how much of sampling the call needs.
        planner: splits admissions into forwards.
        wanted: what the call is told of each token besides its log-probability.
        run_ahead: steps that may be launched before the result of an earlier one is read.
        timeline: of the call.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        prefill: PrefillRunner,
        scheduler: Scheduler,
        variant: Variant,
        planner: PrefillPlanner,
        run_ahead: int,
        timeline: Timeline,
        wanted: Wanted = NOTHING,
    ) -> None:
        self._decoder = decoder
        self._prefill = prefill
        self._scheduler = scheduler
        self._variant = variant
        self._planner = planner
        self._wanted = wanted
        self._run_ahead = run_ahead
        self._timeline = timeline
        self._logits = PromptLogits()
        self._launched: deque[_Launched] = deque()
        self._table_version = -1
        self.decode_steps = 0
        self.cascade_steps = 0
        """Decode steps in which attention read shared keys once."""
        self.prefilled_rows = 0
        """Rows that a prefill gave a token."""

    @property
    def prefill_counts(self) -> PrefillCounts:
        """What the prefills of the call ran so far."""
        return self._prefill.counts

    def launch(self, plan: StepPlan) -> None:
        """Start a step."""
        report = self._run_prefill(plan) if isinstance(plan, PrefillStep) else self._run_decode(plan)
        self._timeline.launched()
        arrived = None
        if report.device.type == "cuda":
            on_host = torch.empty(report.shape, dtype=report.dtype, device="cpu", pin_memory=True)
            report = on_host.copy_(report, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        else:
            report = report.clone()
        self._launched.append(_Launched(plan, report, arrived))

    def collect(self, *, everything: bool) -> Iterator[tuple[StepPlan, StepResult]]:
        """Results of the steps launched longest ago: all of them, or all but those that may run ahead."""
        while len(self._launched) > (0 if everything else self._run_ahead):
            step = self._launched.popleft()
            self._timeline.enter("prefill" if isinstance(step.plan, PrefillStep) else "decode")
            if step.arrived is not None:
                step.arrived.synchronize()
            report = step.report.numpy()
            tokens, outcomes, bits = report[:3]
            details = self._wanted.read(report[3:])
            yield step.plan, StepResult(tokens.astype(np.int64), outcomes, bits.view(np.float32), details)

    def _run_prefill(self, plan: PrefillStep) -> Tensor:
        takers = plan.takers()
        run = [source for source in takers if source >= 0]
        requests = [plan.admitted[source] for source in run]
        self._timeline.enter("planning")
        lengths = [request.length for request in requests]
        prefill = self._planner.plan(lengths) if run else None
        if prefill is not None:
            self._timeline.enter("capture")
            self._prefill.capture_for(requests, prefill.forwards)
        self._timeline.launch("prefill")
        self.prefilled_rows += len(plan.admitted)
        outputs = iter(()) if prefill is None else self._prefill.run(requests, prefill)
        # The device runs the first forward while the host sets up the slots.
        begun = list(islice(outputs, 1))
        slots = self._decoder.state.admit(plan.admitted)
        sampled: list[tuple[np.ndarray, Tensor]] = []
        if earlier := [source for source in takers if source < 0]:
            logits = self._logits.of([plan.group_of(source) for source in earlier])
            sampled.append(self._sample(logits, [takers[source] for source in earlier], slots))
        for forward, logits in zip(prefill.forwards if prefill else (), chain(begun, outputs), strict=True):
            sources = [run[index] for index in forward.indices]
            for place, source in enumerate(sources):
                if source in plan.kept:
                    self._logits.keep(plan.group_of(source), logits[place])
            sampled.append(self._sample(logits, [takers[source] for source in sources], slots))
        self._logits.drop_others({plan.group_of(source) for source in plan.kept})
        if plan.copies:
            old, new = upload(np.ascontiguousarray(np.array(plan.copies, np.int64).T), slots.device)
            self._decoder.storage.copy_pages(old, new)
        return _join(sampled, len(slots))

    def _sample(self, logits: Tensor, takers: Sequence[Sequence[int]], slots: Tensor) -> tuple[np.ndarray, Tensor]:
        """Sample from each row of logits as often as it has takers: which slots these are, and their report."""
        columns = np.array([taker for row in takers for taker in row], np.int64)
        if len(columns) > len(logits):
            places = np.repeat(np.arange(len(takers)), [len(row) for row in takers])
            logits = logits[upload(places, slots.device)]
        chosen = slots if _are_all(columns, len(slots)) else slots[upload(columns, slots.device)]
        return columns, advance(self._decoder.state, chosen, logits, self._variant, self._wanted)

    def _run_decode(self, plan: DecodeStep) -> Tensor:
        self._timeline.enter("cache")
        slots = self._scheduler.slots
        if self._table_version != slots.table_version:
            self._decoder.state.load_table(slots.block_table)
            self._table_version = slots.table_version
        self._timeline.enter("capture")
        cascade = plan.clusters is not None
        self._decoder.steps.capture_for(len(plan.slots), self._variant, self._wanted, cascade=cascade)
        self._timeline.launch("decode")
        self.decode_steps += 1
        self.cascade_steps += cascade
        return self._decoder.steps.launch(plan.slots, plan.longest, self._variant, self._wanted, plan.clusters)


def _are_all(columns: np.ndarray, count: int) -> bool:
    return np.array_equal(columns, np.arange(count))


def _join(sampled: Sequence[tuple[np.ndarray, Tensor]], count: int) -> Tensor:
    """One report of reports that belong to some of its columns each."""
    columns, first = sampled[0]
    if _are_all(columns, count):
        return first
    report = first.new_empty(len(first), count)
    for columns, part in sampled:
        report[:, upload(columns, part.device)] = part
    return report
