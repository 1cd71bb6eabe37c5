"""Packed prefills captured once for each number of tokens that they are filled up to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from liveroll.attention import interface
from liveroll.attention.backend import AttentionBackend
from liveroll.attention.calls import PackedCall
from liveroll.attention.layout import PackedLayout, columns_of
from liveroll.config import RolloutConfig, no_prefill_capture
from liveroll.decode.attempt import attempt_capture
from liveroll.decode.feeding import TunedForward
from liveroll.decode.graphs import GraphKey, GraphStore
from liveroll.decode.upload import upload, upload_into
from liveroll.distributed.lent import LentGroup
from liveroll.errors import CaptureError
from liveroll.kv.storage import PagedStorage
from liveroll.model.fusion import Fusion
from liveroll.model.hooks import without_hooks
from liveroll.planning.ladder import rung_for, token_ladder

logger = logging.getLogger("liveroll")


class CapturedPrefill:
    """Packed forwards over static tensors. What a forward has no prompts for is filled with inert tokens.

    An inert token is a sequence of its own: it stands at position 0, attends to itself, and writes to the scratch page.

    Args:
        model: the model.
        config: the engine's.
        graphs: keeps the captured forwards, beside the decode steps.
        fusion: the model's projections that are one product meanwhile.
        tp_group: the ranks that hold shards of the model and capture together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: RolloutConfig,
        graphs: GraphStore,
        fusion: Fusion,
        tp_group: LentGroup,
    ) -> None:
        self._model = model
        self._tp_group = tp_group
        self._config = config
        self._graphs = graphs
        self.forward = TunedForward(model, config.compile, fusion, packed=True)
        """Runs the model over packed sequences."""
        self._rungs = token_ladder(config.prefill_capture_tokens)
        self._storage: PagedStorage | None = None
        self._backend: AttentionBackend | None = None
        self._inputs: Tensor | None = None
        self._logits: Tensor | None = None
        self._lengths: tuple[int, ...] = ()
        self.eager_reason = no_prefill_capture(config, model.device.type)
        """Why packed prefills are not captured; None where they are."""

    @property
    def bytes(self) -> int:
        """Bytes of the forwards' inputs and outputs."""
        return sum(tensor.nbytes for tensor in (self._inputs, self._logits) if tensor is not None)

    def begin(self, storage: PagedStorage, backend: AttentionBackend, eager_reason: str | None) -> None:
        """Begin anew, when the captured forwards were dropped.

        Args:
            storage: where keys and values go from now on.
            backend: attention from now on.
            eager_reason: why no forward of the model can be captured, or None.
        """
        self._storage, self._backend = storage, backend
        self.eager_reason = no_prefill_capture(self._config, self._model.device.type) or eager_reason

    def release(self) -> None:
        """Drop all that the forwards run on."""
        self._storage = self._backend = self._inputs = self._logits = None

    def size_for(self, tokens: int, most: int | None) -> int | None:
        """Tokens that a forward over so many is filled up to, captured if it is not yet; None where it runs eagerly.

        Args:
            tokens: of its prompts.
            most: tokens that a forward may have, or None.

        Raises:
            CaptureError: it cannot be captured, and the configuration does not let it run eagerly.
            CompileError: it cannot be compiled, and must be.
        """
        if self.eager_reason is not None or tokens > self._rungs[-1]:
            return None
        size = rung_for(tokens, self._rungs)
        if most is not None and size > most:
            return None
        if not self._graphs.holds(_key(size)):
            self._capture(size)
        return size if self.eager_reason is None else None

    def run(self, size: int, contexts: Sequence[np.ndarray], rows: np.ndarray) -> Tensor:
        """Logits `[N, V]` behind the last token of each context; overwritten by the next forward.

        Args:
            size: of a captured forward, by `size_for`.
            contexts: int64 tokens of N sequences, of no more tokens than that.
            rows: int64 storage rows of their tokens.
        """
        lengths = [len(context) for context in contexts]
        self._load(size, self._lay_out(size, contexts, rows), (*lengths, *(1,) * (size - sum(lengths))))
        self._graphs.replay(_key(size))
        assert self._logits is not None
        return self._logits[: len(lengths)]

    def run_uncaptured(self, contexts: Sequence[np.ndarray], rows: np.ndarray) -> Tensor:
        """As `run`, for a forward of more tokens than are captured: compiled and fused as those are."""
        lengths = [len(context) for context in contexts]
        size = sum(lengths)
        given = upload(self._lay_out(size, contexts, rows), self._model.device)
        return self._run_forward(given, size, tuple(lengths))[: len(lengths)]

    def _lay_out(self, size: int, contexts: Sequence[np.ndarray], rows: np.ndarray) -> np.ndarray:
        """What a forward of a size is given: tokens, positions and storage rows, and each context's last token."""
        lengths = [len(context) for context in contexts]
        used = sum(lengths)
        given = np.zeros(self._width(size), np.int64)
        tokens, column, index = given[: 3 * size].reshape(3, size)
        tokens[:used] = np.concatenate(contexts)
        column[:used] = columns_of(lengths)
        index[:used] = rows
        given[3 * size : 3 * size + len(lengths)] = np.cumsum(lengths) - 1
        return given

    def _run_forward(self, given: Tensor, size: int, lengths: tuple[int, ...] | None) -> Tensor:
        assert self._storage is not None
        assert self._backend is not None
        tokens, column, index = given[: 3 * size].view(3, size)
        layout = PackedLayout(lengths, column)
        with interface.bound(PackedCall(self._backend, self._storage, layout, index)):
            return self.forward(tokens[None], column[None], given[3 * size :])[0]

    def _capture(self, size: int) -> None:
        # Nothing of an earlier forward may be there: its pages are others' by now.
        self._load(size, np.zeros(self._width(size), np.int64), (1,) * size)
        if failed := attempt_capture(
            self._graphs, _key(size), self._make_step(size), self._model, self._tp_group.get()
        ):
            reason = f"packed prefills cannot be captured, because of {failed.cause}"
            if self._config.prefill_capture is True:
                raise CaptureError(f"{reason}; set prefill_capture='auto' to run them eagerly") from failed.error
            self.eager_reason = reason
            logger.warning("prefilling eagerly: %s", reason)

    def _width(self, size: int) -> int:
        """Numbers that a forward of a size is given: three of each token, and the last token of each prompt."""
        return 3 * size + self._config.max_slots

    def _load(self, size: int, given: np.ndarray, lengths: tuple[int, ...]) -> None:
        device = self._model.device
        if self._inputs is None:
            self._inputs = torch.zeros(self._width(self._rungs[-1]), dtype=torch.int64, device=device)
        upload_into(given, self._inputs[: self._width(size)])
        self._lengths = lengths

    def _make_step(self, size: int) -> Callable[[], None]:
        assert self._inputs is not None
        given = self._inputs[: self._width(size)]
        # A graph serves any lengths; a forward that is run again by the host reads those of now.
        baked = self._model.device.type == "cuda"

        def step() -> None:
            with without_hooks(self._model):
                logits = self._run_forward(given, size, None if baked else self._lengths)
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            self._logits.copy_(logits)

        return step


def _key(size: int) -> GraphKey:
    return "prefill", size
