"""The model's forward where it is captured: its projections fused, and compiled where that was asked for."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.fx import GraphModule
from transformers import PreTrainedModel

from liveroll.errors import CompileError
from liveroll.kv.cache import PassingCache
from liveroll.model.forward import ModelForward
from liveroll.model.fusion import Fusion
from liveroll.model.rewriting import rewrite
from liveroll.model.versions import COMPILE_FAILURES, inductor, last_recompile_reason

logger = logging.getLogger("liveroll")


class TunedForward:
    """Runs the model over one new token of each of several rows, or over packed sequences.

    Compiled code serves any number of rows, or of tokens and prompts in the one packed row, but for a single one. It
    takes the weights as they are when it runs, and knows neither pages nor rows, so nothing of an engine's life makes
    it compile again.

    Args:
        model: the model.
        compile: whether to; `auto` does on a GPU, and goes on without where it cannot be.
        fusion: the model's projections that are one product meanwhile.
        packed: whether it is given packed sequences.
    """

    def __init__(
        self, model: PreTrainedModel, compile: bool | Literal["auto"], fusion: Fusion, *, packed: bool = False
    ) -> None:
        self._fusion = fusion
        self._forward = ModelForward(model)
        self._must = compile is True
        self._varying = 1 if packed else 0
        self._compiled: Callable[[Tensor, Tensor, Tensor | int], Tensor] | None = None
        self.compilations: list[str] = []
        """Why code was compiled, each time it was."""
        self._compiler = _Compiler()
        self.uncompiled_reason: str | None = None
        if compile is True or (compile == "auto" and model.device.type == "cuda"):
            run = types.MethodType(_own_copy(cast(types.FunctionType, type(self)._run)), self)
            self._compiled = torch.compile(run, backend=self._compiler, fullgraph=True)

    def __call__(self, tokens: Tensor, positions: Tensor, keep: Tensor | int = 0) -> Tensor:
        """Logits `[B, K, V]` behind tokens `[B, T]` at positions `[B, T]`, both int64.

        Args:
            tokens: `[B, 1]`, or `[1, T]` of packed sequences.
            positions: of the same shape.
            keep: as `ModelForward` takes it.

        Raises:
            CompileError: the forward cannot be compiled, and must be.
        """
        with self._fusion.in_force():
            run = self._run if self._compiled is None else self._run_compiled
            return run(tokens, positions, keep)

    def _run_compiled(self, tokens: Tensor, positions: Tensor, keep: Tensor | int) -> Tensor:
        assert self._compiled is not None
        tokens, positions = tokens.contiguous(), positions.contiguous()
        if tokens.shape[self._varying] > 1:
            for given in (tokens, positions):
                torch._dynamo.maybe_mark_dynamic(given, self._varying)
        if isinstance(keep, Tensor) and len(keep) > 1:
            torch._dynamo.maybe_mark_dynamic(keep, 0)
        try:
            logits: Tensor = self._compiled(tokens, positions, keep)
        except COMPILE_FAILURES as error:
            reason = f"the model's forward cannot be compiled: {_first_line(error)}"
            if self._must:
                raise CompileError(f"{reason}; set compile='auto' or False to run it as it is") from error
            self._compiled, self.uncompiled_reason = None, reason
            logger.warning("running without compilation: %s", reason)
            return self._run(tokens, positions, keep)
        if self._compiler.graphs > len(self.compilations):
            self.compilations.append(last_recompile_reason() or "the first run")
        return logits

    def _run(self, tokens: Tensor, positions: Tensor, keep: Tensor | int) -> Tensor:
        return self._forward(tokens, positions, PassingCache(), keep=keep)


class _Compiler:
    """Compiles traced graphs and counts them. torch keeps every one for good, so it must not know of any model."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        rewrite(graph)
        compiled = inductor(graph, inputs)
        self.graphs += 1
        return compiled


def _own_copy(function: types.FunctionType) -> types.FunctionType:
    """The function with code of its own: what is compiled is kept with the code, and for so many variants only."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:  # the compiler's own error says little but that there was one
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
