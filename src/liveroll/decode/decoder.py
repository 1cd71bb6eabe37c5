"""Decode steps on the device, captured once and replayed for as long as what they depend on stays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from liveroll.attention.backend import AttentionBackend, choose_backend
from liveroll.config import RolloutConfig
from liveroll.decode.attempt import attempt_capture
from liveroll.decode.capture import choose_capture
from liveroll.decode.dependence import Dependence
from liveroll.decode.feeding import TunedForward
from liveroll.decode.graphs import GraphKey, GraphStore
from liveroll.decode.room import make_room
from liveroll.decode.sampler import Variant
from liveroll.decode.state import RowState
from liveroll.decode.step import decode
from liveroll.decode.upload import upload, upload_into
from liveroll.distributed.agreement import any_rank, failing_together, least_of
from liveroll.distributed.lent import LentGroup
from liveroll.errors import CaptureError
from liveroll.kv.budget import check_fits
from liveroll.kv.pool import StoragePool
from liveroll.kv.storage import PagedStorage, bytes_per_token
from liveroll.model.fusion import Fusion
from liveroll.model.geometry import ModelShape
from liveroll.model.hooks import without_hooks
from liveroll.planning.ladder import ladder, rung_for
from liveroll.prefill.captured import CapturedPrefill
from liveroll.scheduling.details import NOTHING, Wanted

logger = logging.getLogger("liveroll")


class Decoder:
    """Owns what decoding keeps from call to call: KV pages, the running batch, and the captured steps.

    Args:
        model: the model.
        config: the engine's.
        tp_group: the ranks that hold shards of the model and capture together, or None.
    """

    def __init__(self, model: PreTrainedModel, config: RolloutConfig, tp_group: ProcessGroup | None) -> None:
        self._model = model
        self._config = config
        self._tp_group = LentGroup(tp_group)
        self.fusion = Fusion(model, config.fuse)
        """Runs projections as one product in decode steps."""
        self.forward = TunedForward(model, config.compile, self.fusion)
        """Runs the model in decode steps."""
        self._dependence = Dependence(model, config, self.fusion)
        self._pool = StoragePool(config)
        self.graphs = GraphStore(lambda: choose_capture(model.device), config.max_captures)
        self.prefill = CapturedPrefill(model, config, self.graphs, self.fusion, self._tp_group)
        """Runs packed prefills where they are captured."""
        self._state: RowState | None = None
        self._backend: AttentionBackend | None = None
        self._rungs = ladder(config.max_slots)
        self._rows = np.empty(0, np.int64)
        self._rows_on_device: Tensor | None = None
        self._reports: dict[Wanted, Tensor] = {}
        self._longest = 0
        self.eager_reason: str | None = "RolloutConfig.capture is False" if config.capture is False else None

    @property
    def storage(self) -> PagedStorage:
        """The KV pages; there are some after `prepare`."""
        assert self._pool.storage is not None
        return self._pool.storage

    @property
    def state(self) -> RowState:
        """The running batch; there is one after `prepare`."""
        assert self._state is not None
        return self._state

    @property
    def backend(self) -> AttentionBackend:
        """Attention for the model's layers; chosen by `prepare`."""
        assert self._backend is not None
        return self._backend

    @property
    def tp_group(self) -> ProcessGroup | None:
        """The ranks that hold shards of the model. Raises EngineStateError where the group has been destroyed."""
        return self._tp_group.get()

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV pages held."""
        return self._pool.bytes

    @property
    def static_bytes(self) -> int:
        """Bytes of the running batch and of the steps' inputs and outputs."""
        tensors = [tensor for tensor in (self._rows_on_device, *self._reports.values()) if tensor is not None]
        rows = 0 if self._state is None else self._state.bytes
        return sum(tensor.nbytes for tensor in tensors) + rows + self.prefill.bytes

    def prepare(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        modules: Sequence[nn.Module],
        *,
        longest: int,
        stops: int,
        variant: Variant,
        adjusted: int = 0,
        sampled_size: int | None = None,
    ) -> None:
        """Make ready for a call: keep everything if what it depends on has not changed, else begin anew.

        A call refused before anything is let go leaves all as it was.

        Args:
            shape: the model's layers.
            dtype: dtype of keys and values.
            modules: all modules of the model.
            longest: keys and values that the longest row of the call comes to hold.
            stops: most stop tokens of a row.
            variant: how much of sampling the call runs.
            adjusted: most tokens whose scores a row adjusts.
            sampled_size: ids below this may be sampled; all of them if None.

        Raises:
            KVMemoryError: the memory allowed cannot hold the longest row.
            CaptureError: `capture` is True and the model's step cannot be captured.
            FusionError: `fuse` is True and projections cannot be fused.
        """
        device = self._model.device
        with failing_together(self.tp_group, device):
            self.wake()
            room = make_room(self._config, self._state, longest, stops, adjusted)
            room["ids that may be sampled"] = min(sampled_size or shape.vocab_size, shape.vocab_size)
            signature, difference, needed = self._dependence.compare(shape, dtype, modules, room)
        if any_rank(difference is not None, self.tp_group, device):
            reason = difference or "another rank of the tensor-parallel group had to capture again"
            needed = self._agree_on_hooks(needed)
            with failing_together(self.tp_group, device):
                self._begin_anew(shape, dtype, longest, room, reason)
            if self._config.capture is not False:
                self.eager_reason = needed
            self.prefill.begin(self.storage, self.backend, needed)
        check_fits(self._config.page_size, longest, self.storage.pages - 1, bytes_per_token(shape.layers, dtype))
        if variant is Variant.FULL:
            self.state.keep_histories()
        self._dependence.keep(signature)

    def capture_for(self, rows: int, variant: Variant, wanted: Wanted = NOTHING) -> None:
        """Capture the decode step of a batch of `rows` rows, if steps are captured and this one is not yet.

        Raises:
            CaptureError: the step cannot be captured, and the configuration does not let it run eagerly.
        """
        key = self._key(rows, variant, wanted)
        if self.eager_reason is None and not self.graphs.holds(key):
            self._capture(key)

    def launch(self, slots: np.ndarray, longest: int, variant: Variant, wanted: Wanted = NOTHING) -> Tensor:
        """Run one decode step, captured by `capture_for`.

        Args:
            slots: int64 slots of the running rows.
            longest: keys of the longest of them.
            variant: how much of sampling to run.
            wanted: what to report of each token besides its log-probability.

        Returns:
            `[3 + wanted.rows, B]` int32, the report of each slot; overwritten by the next step.
        """
        if self.eager_reason is not None:
            rows = upload(slots, self._model.device)
            return decode(self.forward, self.state, rows, self.storage, self.backend, longest, variant, wanted)
        self._longest = longest
        key = self._key(len(slots), variant, wanted)
        self._load_rows(slots, key[1])
        self.graphs.replay(key)
        return self._reports[wanted][:, : len(slots)]

    def release(self) -> None:
        """Free the KV pages, the captured steps and the running batch; the next call makes them again."""
        self._dependence.forget()
        self.graphs.drop(None)
        self.prefill.release()
        self._state = self._backend = self._rows_on_device = None
        self._reports = {}
        self._pool.release()

    def sleep(self) -> bool:
        """Give the KV memory back and keep the captured steps; where that cannot be, release all and return False."""
        if self._pool.sleep():
            return True
        self.release()
        return False

    def wake(self) -> None:
        """Take the KV memory again after `sleep`; the next call does so itself."""
        self._pool.wake()

    def _begin_anew(
        self, shape: ModelShape, dtype: torch.dtype, longest: int, room: dict[str, int], reason: str
    ) -> None:
        device, size, slots = self._model.device, self._config.page_size, self._config.max_slots
        width = -(-room["tokens a row"] // size)
        # Ranks with fewer pages would put rows back, or give up a prompt that is kept, where the others go on. A rank
        # that alone released what it had may need fewer.
        pages = min(slots * width, self._pool.allowed(shape, dtype, device))
        pages = least_of(pages, self.tp_group, device)
        check_fits(size, longest, pages, bytes_per_token(shape.layers, dtype))
        self.graphs.drop(reason)
        self.release()
        self._pool.provide(shape, dtype, device, pages)
        self._state = RowState(
            slots,
            table_width=width,
            stop_width=room["stop tokens a row"],
            adjusted_width=room["adjusted tokens a row"],
            vocab_size=shape.vocab_size,
            sampled_size=room["ids that may be sampled"],
            device=device,
        )
        self._backend = choose_backend(device, slots * max(layer.kv_heads for layer in shape.layers))
        self._rows_on_device = torch.full((slots,), self.state.inert, dtype=torch.int64, device=device)

    def _key(self, rows: int, variant: Variant, wanted: Wanted) -> GraphKey:
        """The captured step for a batch: two variants at most of what is wanted, since greedy rows are plain ones."""
        return "decode", rung_for(rows, self._rungs), variant if variant is Variant.FULL else Variant.PLAIN, wanted

    def _capture(self, key: GraphKey) -> None:
        _, rung, variant, wanted = key
        self._load_rows(np.empty(0, np.int64), rung)
        self._longest = 1
        step = self._make_step(rung, variant, wanted)
        if failed := attempt_capture(self.graphs, key, step, self._model, self.tp_group):
            reason = f"the decode step cannot be captured, because of {failed.cause}"
            if self._config.capture is True:
                raise CaptureError(f"{reason}; set capture='auto' to run it eagerly") from failed.error
            self.eager_reason = reason
            logger.warning("decoding eagerly: %s", reason)

    def _make_step(self, rung: int, variant: Variant, wanted: Wanted) -> Callable[[], None]:
        forward, state, storage, backend = self.forward, self.state, self.storage, self.backend
        rows = self._rows_on_device
        assert rows is not None
        if wanted not in self._reports:
            shape = (3 + wanted.rows, state.slots)
            self._reports[wanted] = torch.zeros(shape, dtype=torch.int32, device=rows.device)
        report = self._reports[wanted]
        # A graph has the bound of the rows' keys baked in, so it must hold for all of them; a step that is run again
        # by the host reads the bound of now.
        baked = self._model.device.type == "cuda"
        capacity = state.block_table.shape[1] * storage.page_size

        def step() -> None:
            longest = capacity if baked else self._longest
            with without_hooks(self._model):
                report[:, :rung] = decode(forward, state, rows[:rung], storage, backend, longest, variant, wanted)

        return step

    def _load_rows(self, slots: np.ndarray, rung: int) -> None:
        """Put slots into the steps' input, and the inert one behind them."""
        rows = np.full(rung, self.state.inert, np.int64)
        rows[: len(slots)] = slots
        if not np.array_equal(rows, self._rows):
            assert self._rows_on_device is not None
            self._rows = np.empty(0, np.int64)  # those on the device are unknown, should this be interrupted
            upload_into(rows, self._rows_on_device[:rung])
            self._rows = rows

    def _agree_on_hooks(self, needed: str | None) -> str | None:
        """Why no rank can capture the model, where one of them needs its hooks."""
        if any_rank(needed is not None, self.tp_group, self._model.device):
            needed = needed or "another rank of the tensor-parallel group needs hooks in every forward"
        if needed and True in (self._config.capture, self._config.prefill_capture):
            raise CaptureError(f"the model cannot be captured: {needed}; set capture and prefill_capture to 'auto'")
        return needed
