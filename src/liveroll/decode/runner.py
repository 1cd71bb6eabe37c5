"""Step plans carried out on the device, a few steps ahead of their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from liveroll.decode.advance import advance
from liveroll.decode.decoder import Decoder
from liveroll.decode.sampler import Variant
from liveroll.decode.upload import upload
from liveroll.planning.prefill import PrefillPlanner
from liveroll.prefill.runner import PrefillCounts, PrefillRunner
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
    ) -> None:
        self._decoder = decoder
        self._prefill = prefill
        self._scheduler = scheduler
        self._variant = variant
        self._planner = planner
        self._run_ahead = run_ahead
        self._timeline = timeline
        self._launched: deque[_Launched] = deque()
        self._table_version = -1
        self.decode_steps = 0
        self.prefilled_rows = 0
        """Rows that a prefill gave a token."""

    @property
    def prefill_counts(self) -> PrefillCounts:
        """What the prefills of the call ran so far."""
        return self._prefill.counts

    def launch(self, plan: StepPlan) -> None:
        """Start a step."""
        self._timeline.enter("cache")
        if self._table_version != self._scheduler.table_version:
            self._decoder.state.load_table(self._scheduler.block_table)
            self._table_version = self._scheduler.table_version
        report = self._run_prefill(plan) if isinstance(plan, PrefillStep) else self._run_decode(plan)
        self._timeline.launched()
        arrived = None
        if report.device.type == "cuda":
            on_host = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
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
            tokens, outcomes, bits = step.report.numpy()
            yield step.plan, StepResult(tokens.astype(np.int64), outcomes, bits.view(np.float32))

    def _run_prefill(self, plan: PrefillStep) -> Tensor:
        self._timeline.enter("planning")
        lengths = [len(request.prompt) + len(request.tokens) for request in plan.admitted]
        prefill = self._planner.plan(lengths)
        self._timeline.launch("prefill")
        self.prefilled_rows += len(plan.admitted)
        state = self._decoder.state
        slots = state.admit(plan.admitted)
        report = torch.empty(3, len(slots), dtype=torch.int32, device=slots.device)
        for forward in prefill.forwards:
            logits = self._prefill.run(plan.admitted, forward, prefill.route)
            rows = upload(np.array(forward.indices), slots.device)
            report[:, rows] = advance(state, slots[rows], logits, self._variant)
        return report

    def _run_decode(self, plan: DecodeStep) -> Tensor:
        self._timeline.enter("capture")
        self._decoder.capture_for(len(plan.slots), self._variant)
        self._timeline.launch("decode")
        self.decode_steps += 1
        return self._decoder.launch(plan.slots, plan.longest, self._variant)
