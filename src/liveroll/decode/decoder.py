"""What decoding keeps from call to call, for as long as what it depends on stays."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from liveroll.attention.backend import AttentionBackend, choose_backend
from liveroll.config import RolloutConfig
from liveroll.decode.capture import choose_capture
from liveroll.decode.captured import CapturedDecode
from liveroll.decode.dependence import Dependence
from liveroll.decode.graphs import GraphStore
from liveroll.decode.room import make_room
from liveroll.decode.sampler import Variant
from liveroll.decode.state import RowState
from liveroll.distributed.agreement import any_rank, failing_together, least_of
from liveroll.distributed.lent import LentGroup
from liveroll.errors import CaptureError
from liveroll.kv.budget import check_fits
from liveroll.kv.pool import StoragePool
from liveroll.kv.storage import PagedStorage, bytes_per_token
from liveroll.model.fusion import Fusion
from liveroll.model.geometry import ModelShape
from liveroll.prefill.captured import CapturedPrefill


class Decoder:
    """Owns the KV pages, the running batch, and the captured steps.

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
        """Runs projections as one product in decode steps and captured prefills."""
        self._dependence = Dependence(model, config, self.fusion)
        self._pool = StoragePool(config)
        self.graphs = GraphStore(lambda: choose_capture(model.device), config.max_captures)
        self.steps = CapturedDecode(model, config, self.graphs, self.fusion, self._tp_group)
        """Runs decode steps, captured or not."""
        self.prefill = CapturedPrefill(model, config, self.graphs, self.fusion, self._tp_group)
        """Runs packed prefills where they are captured."""
        self._state: RowState | None = None
        self._backend: AttentionBackend | None = None

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
        return (0 if self._state is None else self._state.bytes) + self.steps.bytes + self.prefill.bytes

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
            group = max(layer.query_heads // layer.kv_heads for layer in shape.layers)
            together = self.backend.rows_together(group, dtype)
            self.steps.begin(self.state, self.storage, self.backend, needed, together)
            self.prefill.begin(self.storage, self.backend, needed)
        check_fits(self._config.page_size, longest, self.storage.pages - 1, bytes_per_token(shape.layers, dtype))
        if variant is Variant.FULL:
            self.state.keep_histories()
        self._dependence.keep(signature)

    def release(self) -> None:
        """Free the KV pages, the captured steps and the running batch; the next call makes them again."""
        self._dependence.forget()
        self.graphs.drop(None)
        self.steps.release()
        self.prefill.release()
        self._state = self._backend = None
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

    def _agree_on_hooks(self, needed: str | None) -> str | None:
        """Why no rank can capture the model, where one of them needs its hooks."""
        if any_rank(needed is not None, self.tp_group, self._model.device):
            needed = needed or "another rank of the tensor-parallel group needs hooks in every forward"
        if needed and True in (self._config.capture, self._config.prefill_capture):
            raise CaptureError(f"the model cannot be captured: {needed}; set capture and prefill_capture to 'auto'")
        return needed
