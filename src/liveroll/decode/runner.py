"""Step plans carried out on the device, a few steps ahead of their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from liveroll.config import PrefillRoute
from liveroll.decode.advance import advance
from liveroll.decode.decoder import Decoder
from liveroll.decode.sampler import Variant
from liveroll.decode.upload import upload
from liveroll.planning.prefill import plan_forwards
from liveroll.prefill.runner import PrefillCounts, PrefillRunner
from liveroll.scheduling.details import NOTHING, Wanted
from liveroll.scheduling.plan import DecodeStep, PrefillStep, StepPlan, StepResult
from liveroll.scheduling.scheduler import Scheduler


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
        wanted: what the call is told of each token besides its log-probability.
        route: how admissions are prefilled.
        max_tokens: token positions in one prefill forward, or None.
        run_ahead: steps that may be launched before the result of an earlier one is read.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        prefill: PrefillRunner,
        scheduler: Scheduler,
        variant: Variant,
        route: PrefillRoute,
        max_tokens: int | None,
        run_ahead: int,
        wanted: Wanted = NOTHING,
    ) -> None:
        self._decoder = decoder
        self._prefill = prefill
        self._scheduler = scheduler
        self._variant = variant
        self._wanted = wanted
        self._route = route
        self._max_tokens = max_tokens
        self._run_ahead = run_ahead
        self._launched: deque[_Launched] = deque()
        self._table_version = -1
        self.decode_steps = 0

    @property
    def prefill_counts(self) -> PrefillCounts:
        """What the prefills of the call ran so far."""
        return self._prefill.counts

    def launch(self, plan: StepPlan) -> None:
        """Start a step."""
        if self._table_version != self._scheduler.table_version:
            self._decoder.state.load_table(self._scheduler.block_table)
            self._table_version = self._scheduler.table_version
        report = self._run_prefill(plan) if isinstance(plan, PrefillStep) else self._run_decode(plan)
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
            if step.arrived is not None:
                step.arrived.synchronize()
            report = step.report.numpy()
            tokens, outcomes, bits = report[:3]
            details = self._wanted.read(report[3:])
            yield step.plan, StepResult(tokens.astype(np.int64), outcomes, bits.view(np.float32), details)

    def _run_prefill(self, plan: PrefillStep) -> Tensor:
        state = self._decoder.state
        slots = state.admit(plan.admitted)
        lengths = [len(request.prompt) + len(request.tokens) for request in plan.admitted]
        report = torch.empty(3 + self._wanted.rows, len(slots), dtype=torch.int32, device=slots.device)
        for forward in plan_forwards(self._route, lengths, self._max_tokens):
            logits = self._prefill.run(plan.admitted, forward)
            rows = upload(np.array(forward.indices), slots.device)
            report[:, rows] = advance(state, slots[rows], logits, self._variant, self._wanted)
        return report

    def _run_decode(self, plan: DecodeStep) -> Tensor:
        self.decode_steps += 1
        return self._decoder.launch(plan.slots, plan.longest, self._variant, self._wanted)
