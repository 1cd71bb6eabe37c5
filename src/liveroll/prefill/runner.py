"""Prefill on the device: the forwards of a plan, their keys and values written to pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from liveroll.attention import interface
from liveroll.attention.backend import AttentionBackend
from liveroll.attention.calls import PackedCall
from liveroll.attention.layout import PackedLayout
from liveroll.config import Route
from liveroll.kv.cache import PagedCache, PassingCache
from liveroll.kv.storage import PagedStorage
from liveroll.model.forward import ModelForward
from liveroll.model.guard import ModelGuard
from liveroll.planning.prefill import Forward, PrefillPlan
from liveroll.prefill.captured import CapturedPrefill
from liveroll.scheduling.pages import SCRATCH_PAGE
from liveroll.scheduling.request import Request


@dataclass
class PrefillCounts:
    """What the prefills of a call ran.

    Attributes:
        routes: forwards by the route that planned them, in the order in which routes were first taken.
        tokens: token positions, padding included.
        padded: how many of them were padding.
    """

    routes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    padded: int = 0


class PrefillRunner:
    """Runs forwards over contexts.

    Args:
        forward: the model.
        guard: switches to the model's own attention for padded forwards.
        storage: where keys and values go.
        backend: attention of packed forwards.
        captured: runs packed forwards that are captured; None runs all eagerly.
        max_tokens: token positions that a forward may have, or None.
    """

    def __init__(
        self,
        forward: ModelForward,
        guard: ModelGuard,
        storage: PagedStorage,
        backend: AttentionBackend,
        captured: CapturedPrefill | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._forward = forward
        self._guard = guard
        self._storage = storage
        self._backend = backend
        self._captured = captured
        self._max_tokens = max_tokens
        self.counts = PrefillCounts()

    def capture_for(self, requests: Sequence[Request], forwards: Sequence[Forward]) -> None:
        """Capture those of the forwards that are to be captured, and are not yet.

        Raises:
            CaptureError: one cannot be captured, and must be.
            CompileError: one cannot be compiled, and must be.
        """
        for forward in forwards:
            if forward.width is None:
                self._captured_size(sum(requests[index].length for index in forward.indices))

    def run(self, requests: Sequence[Request], plan: PrefillPlan) -> Iterator[Tensor]:
        """Logits `[N, V]` behind the last token of each context of one forward after the other.

        Each is run when it is asked for, and may overwrite the logits of the one before.
        """
        for forward in plan.forwards:
            yield self._run_forward(requests, forward, plan.route)

    def _run_forward(self, requests: Sequence[Request], forward: Forward, route: Route) -> Tensor:
        chosen = [requests[index] for index in forward.indices]
        contexts = [request.context for request in chosen]
        used = sum(len(context) for context in contexts)
        size = self._captured_size(used) if forward.width is None else None
        taken = size or (used if forward.width is None else len(contexts) * forward.width)
        self.counts.routes[route] += 1
        self.counts.tokens += taken
        self.counts.padded += taken - used
        if forward.width is None:
            return self._run_packed(chosen, contexts, size)
        return self._run_padded(chosen, contexts, forward.width)

    def _run_packed(self, requests: Sequence[Request], contexts: Sequence[np.ndarray], size: int | None) -> Tensor:
        device = self._forward.device
        rows = np.concatenate([self._storage_rows(r, len(c)) for r, c in zip(requests, contexts, strict=True)])
        if self._captured is not None and size is not None:
            return self._captured.run(size, contexts, rows)
        if self._captured is not None and self._captured.eager_reason is None:
            return self._captured.run_uncaptured(contexts, rows)
        layout = PackedLayout.of([len(context) for context in contexts], device)
        tokens, index = torch.from_numpy(np.stack([np.concatenate(contexts), rows])).to(device)
        with interface.bound(PackedCall(self._backend, self._storage, layout, index)):
            logits = self._forward(tokens[None], layout.column[None], PassingCache(), keep=layout.last)
        return logits[0]

    def _captured_size(self, tokens: int) -> int | None:
        """Tokens that a packed forward is filled up to, which is captured then; None where it runs as it is."""
        return None if self._captured is None else self._captured.size_for(tokens, self._max_tokens)

    def _run_padded(self, requests: Sequence[Request], contexts: Sequence[np.ndarray], width: int) -> Tensor:
        # Scratch rows take the keys of padding, and token 0 stands there: nothing attends to it.
        grid = np.zeros((4, len(contexts), width), np.int64)
        tokens, positions, index, mask = grid
        for row, (request, context) in enumerate(zip(requests, contexts, strict=True)):
            start = width - len(context)
            tokens[row, start:] = context
            positions[row, start:] = np.arange(len(context))
            index[row, start:] = self._storage_rows(request, len(context))
            mask[row, start:] = 1
        moved = torch.from_numpy(grid).to(self._forward.device)
        with self._guard.own_attention():
            logits = self._forward(
                moved[0], moved[1], PagedCache(self._storage, moved[2].flatten()), mask=moved[3], keep=1
            )
        return logits[:, -1]

    def _storage_rows(self, request: Request, length: int) -> np.ndarray:
        size = self._storage.page_size
        position = np.arange(length)
        pages = np.array(request.pages, np.int64)
        pages[: request.borrowed] = SCRATCH_PAGE
        rows: np.ndarray = pages[position // size] * size + position % size
        return rows
