"""Decode steps, captured once for each size of the running batch and replayed for as long as they hold."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from liveroll.attention.backend import AttentionBackend
from liveroll.config import RolloutConfig
from liveroll.decode.attempt import attempt_capture
from liveroll.decode.feeding import TunedForward
from liveroll.decode.graphs import GraphKey, GraphStore
from liveroll.decode.inputs import NO_ROWS, StepInputs
from liveroll.decode.sampler import Variant
from liveroll.decode.state import RowState
from liveroll.decode.step import decode
from liveroll.distributed.lent import LentGroup
from liveroll.errors import CaptureError
from liveroll.kv.storage import PagedStorage
from liveroll.model.fusion import Fusion
from liveroll.model.hooks import without_hooks
from liveroll.planning.ladder import ladder, rung_for
from liveroll.scheduling.clusters import NO_CLUSTERS, Clusters
from liveroll.scheduling.details import NOTHING, Wanted

logger = logging.getLogger("liveroll")


@dataclass(frozen=True)
class _Held:
    """What steps run on, from one beginning to the next."""

    state: RowState
    storage: PagedStorage
    backend: AttentionBackend
    inputs: StepInputs

    def run(
        self, forward: TunedForward, rows: int, longest: int, variant: Variant, wanted: Wanted, cascade: bool
    ) -> Tensor:
        """A step over what the inputs show of so many rows."""
        slots, prefixes = self.inputs.slots(rows), self.inputs.prefixes(rows) if cascade else None
        return decode(forward, self.state, slots, self.storage, self.backend, longest, variant, wanted, prefixes)


class CapturedDecode:
    """Runs decode steps, captured where they can be.

    Args:
        model: the model.
        config: the engine's.
        graphs: keeps the captured steps.
        fusion: the model's projections that are one product meanwhile.
        tp_group: the ranks that capture together, if there are several.
    """

    def __init__(
        self, model: PreTrainedModel, config: RolloutConfig, graphs: GraphStore, fusion: Fusion, tp_group: LentGroup
    ) -> None:
        self._model = model
        self._config = config
        self._graphs = graphs
        self._tp_group = tp_group
        self.forward = TunedForward(model, config.compile, fusion)
        """Runs the model over one new token of each row."""
        self._rungs = ladder(config.max_slots)
        self._held: _Held | None = None
        self._reports: dict[Wanted, Tensor] = {}
        self.rows_together = 1
        """Rows for which attention can read keys once that they share; 1 if it cannot."""
        self.eager_reason: str | None = "RolloutConfig.capture is False" if config.capture is False else None
        """Why steps are not captured; None where they are."""

    @property
    def bytes(self) -> int:
        """Bytes of the steps' inputs and outputs."""
        inputs = 0 if self._held is None else self._held.inputs.bytes
        return inputs + sum(report.nbytes for report in self._reports.values())

    def begin(
        self,
        state: RowState,
        storage: PagedStorage,
        backend: AttentionBackend,
        eager_reason: str | None,
        rows_together: int,
    ) -> None:
        """Begin anew, when the captured steps were dropped.

        Args:
            state: the running batch from now on.
            storage: where keys and values are from now on.
            backend: attention from now on.
            eager_reason: why no forward of the model can be captured, or None.
            rows_together: rows for which that attention can read keys once.
        """
        inputs = StepInputs(state.slots, state.inert, rows_together, self._model.device)
        self._held, self.rows_together = _Held(state, storage, backend, inputs), rows_together
        if self._config.capture is not False:
            self.eager_reason = eager_reason

    def release(self) -> None:
        """Drop all that the steps run on."""
        self._held, self._reports = None, {}

    def capture_for(self, rows: int, variant: Variant, wanted: Wanted = NOTHING, *, cascade: bool = False) -> None:
        """Capture the step of a batch of `rows` rows, if steps are captured and this one is not yet.

        Args:
            rows: how many.
            variant: how much of sampling it runs.
            wanted: what it reports of each token besides its log-probability.
            cascade: whether attention reads keys once that several rows share.

        Raises:
            CaptureError: the step cannot be captured, and the configuration does not let it run eagerly.
            CompileError: it cannot be compiled, and must be.
        """
        key = self._key(rows, variant, wanted, cascade)
        if self.eager_reason is None and not self._graphs.holds(key):
            self._capture(key)

    def launch(
        self,
        slots: np.ndarray,
        longest: int,
        variant: Variant,
        wanted: Wanted = NOTHING,
        clusters: Clusters | None = None,
    ) -> Tensor:
        """Run one step, captured by `capture_for`.

        Args:
            slots: int64 slots of the running rows.
            longest: keys of the longest of them.
            variant: how much of sampling to run.
            wanted: what to report of each token besides its log-probability.
            clusters: rows whose shared keys attention reads once, or None.

        Returns:
            `[3 + wanted.rows, B]` int32, the report of each slot; overwritten by the next step.
        """
        assert self._held is not None
        cascade, rows = clusters is not None, len(slots)
        if self.eager_reason is not None:
            self._held.inputs.load(slots, clusters, rows)
            return self._held.run(self.forward, rows, longest, variant, wanted, cascade)
        key = self._key(rows, variant, wanted, cascade)
        self._held.inputs.load(slots, clusters, key[1])
        self._graphs.replay(key)
        return self._reports[wanted][:, :rows]

    def _key(self, rows: int, variant: Variant, wanted: Wanted, cascade: bool) -> GraphKey:
        """The captured step for a batch: two variants at most of what is wanted, since greedy rows are plain ones."""
        sampling = variant if variant is Variant.FULL else Variant.PLAIN
        return "decode", rung_for(rows, self._rungs), sampling, wanted, cascade

    def _capture(self, key: GraphKey) -> None:
        assert self._held is not None
        _, rung, variant, wanted, cascade = key
        self._held.inputs.load(NO_ROWS, NO_CLUSTERS if cascade else None, rung)
        step = self._make_step(self._held, rung, variant, wanted, cascade)
        if failed := attempt_capture(self._graphs, key, step, self._model, self._tp_group.get()):
            reason = f"the decode step cannot be captured, because of {failed.cause}"
            if self._config.capture is True:
                raise CaptureError(f"{reason}; set capture='auto' to run it eagerly") from failed.error
            self.eager_reason = reason
            logger.warning("decoding eagerly: %s", reason)

    def _make_step(self, held: _Held, rung: int, variant: Variant, wanted: Wanted, cascade: bool) -> Callable[[], None]:
        device = self._model.device
        if wanted not in self._reports:
            self._reports[wanted] = torch.zeros((3 + wanted.rows, held.state.slots), dtype=torch.int32, device=device)
        report = self._reports[wanted]
        # A graph has the bound of the rows' keys baked in, so it must hold for all that rows can come to have.
        longest = held.state.block_table.shape[1] * held.storage.page_size

        def step() -> None:
            with without_hooks(self._model):
                report[:, :rung] = held.run(self.forward, rung, longest, variant, wanted, cascade)

        return step
