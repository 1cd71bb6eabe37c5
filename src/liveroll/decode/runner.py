"""Step plans carried out on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from liveroll.attention import interface
from liveroll.attention.backend import AttentionBackend
from liveroll.attention.calls import PagedCall
from liveroll.attention.layout import PagedLayout
from liveroll.config import PrefillRoute
from liveroll.decode.advance import advance
from liveroll.decode.sampler import Variant
from liveroll.decode.state import Column, RowState
from liveroll.kv.cache import PagedCache
from liveroll.kv.storage import PagedStorage
from liveroll.model.forward import ModelForward
from liveroll.planning.prefill import plan_forwards
from liveroll.prefill.runner import PrefillCounts, PrefillRunner
from liveroll.scheduling.plan import DecodeStep, PrefillStep, StepPlan, StepResult
from liveroll.scheduling.scheduler import Scheduler


class StepRunner:
    """Runs the steps of one call; the only place that reads from the device, once a step.

    Args:
        forward: the model.
        prefill: runs prefill forwards.
        storage: the KV pages.
        state: the running batch, fresh for the call.
        backend: attention over pages.
        variant: how much of sampling the call needs.
        route: how admissions are prefilled.
        max_tokens: token positions in one prefill forward, or None.
    """

    def __init__(
        self,
        *,
        forward: ModelForward,
        prefill: PrefillRunner,
        storage: PagedStorage,
        state: RowState,
        backend: AttentionBackend,
        variant: Variant,
        route: PrefillRoute,
        max_tokens: int | None,
    ) -> None:
        self._forward = forward
        self._prefill = prefill
        self._storage = storage
        self._state = state
        self._backend = backend
        self._variant = variant
        self._route = route
        self._max_tokens = max_tokens
        self._table_version = -1
        self.decode_steps = 0

    @property
    def prefill_counts(self) -> PrefillCounts:
        """What the prefills of the call ran so far."""
        return self._prefill.counts

    def run(self, plan: StepPlan, scheduler: Scheduler) -> StepResult:
        """Carry out a plan and report what every one of its rows sampled."""
        if self._table_version != scheduler.table_version:
            self._state.load_table(scheduler.block_table)
            self._table_version = scheduler.table_version
        report = self._run_prefill(plan) if isinstance(plan, PrefillStep) else self._run_decode(plan)
        tokens, outcomes, bits = report.cpu().numpy()
        return StepResult(tokens.astype(np.int64), outcomes, bits.view(np.float32))

    def _run_prefill(self, plan: PrefillStep) -> Tensor:
        slots = self._state.admit(plan.admitted)
        lengths = [len(request.prompt) + len(request.tokens) for request in plan.admitted]
        report = torch.empty(3, len(slots), dtype=torch.int32, device=slots.device)
        for forward in plan_forwards(self._route, lengths, self._max_tokens):
            logits = self._prefill.run(plan.admitted, forward)
            rows = torch.tensor(forward.indices, device=slots.device)
            report[:, rows] = advance(self._state, slots[rows], logits, self._variant)
        return report

    def _run_decode(self, plan: DecodeStep) -> Tensor:
        self.decode_steps += 1
        slots = torch.from_numpy(plan.slots).to(self._forward.device)
        return decode(self._forward, self._state, slots, self._storage, self._backend, plan.longest, self._variant)


def decode(
    forward: ModelForward,
    state: RowState,
    slots: Tensor,
    storage: PagedStorage,
    backend: AttentionBackend,
    longest: int,
    variant: Variant,
) -> Tensor:
    """One decode step of `[B]` slots; the report of `advance`.

    Nothing here depends on values on the host but `longest`, an upper bound of the rows' keys.
    """
    numbers = state.numbers[slots]
    position = numbers[:, Column.POSITION]
    table = state.block_table[slots]
    page = table.gather(1, (position // storage.page_size)[:, None])[:, 0].long()
    # Frozen rows write to the first row of the scratch page.
    live = numbers[:, Column.REMAINING] > 0
    index = torch.where(live, page * storage.page_size + position % storage.page_size, 0)
    layout = PagedLayout(table, position + 1, longest)
    with interface.bound(PagedCall(backend, storage, layout)):
        logits = forward(numbers[:, :1], position[:, None], PagedCache(storage, index))
    return advance(state, slots, logits[:, -1], variant)
