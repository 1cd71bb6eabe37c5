"""Who takes part in the decode benchmark: the engine's variants, and what else generates in the trainer's process."""

from __future__ import annotations

import gc
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig


@dataclass(frozen=True)
class Case:
    """Prompts and how many tokens are sampled for each, without stop tokens.

    Attributes:
        name: of the case.
        prompts: token ids.
        budgets: new tokens of each prompt.
        samples: of each prompt.
        slots: rows that decode side by side.
        sampled: at temperature 1, else greedily.
    """

    name: str
    prompts: list[list[int]]
    budgets: list[int]
    samples: int = 1
    slots: int = 32
    sampled: bool = False

    @cached_property
    def sampling(self) -> list[SamplingConfig]:
        """The engine's settings of each prompt, which a trainer makes once and not for every call."""
        temperature = 1.0 if self.sampled else 0.0
        return [
            SamplingConfig(max_new_tokens=budget, temperature=temperature, top_k=0, n=self.samples, logprobs=False)
            for budget in self.budgets
        ]

    @property
    def new_tokens(self) -> int:
        return sum(self.budgets) * self.samples

    @property
    def steps(self) -> int:
        """The fewest decode steps that the case can be done in."""
        decoded = [budget - 1 for budget in self.budgets for _ in range(self.samples)]
        return max(max(decoded), -(-sum(decoded) // self.slots))

    @property
    def keys_read(self) -> int:
        """Keys that decode steps must read: those of a prompt once a step for all of its samples."""
        return sum(
            (budget - 1) * len(prompt) + self.samples * budget * (budget - 1) // 2
            for prompt, budget in zip(self.prompts, self.budgets, strict=True)
        )


Run = Callable[[Case], Any]
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {"capture": False, "prefill_capture": False},
    "captured": {},
    "compiled": {"compile": True},
    "fused": {"compile": True, "fuse": True},
}


class Ours:
    """The engine in one variant; one engine for each number of slots."""

    def __init__(self, model: PreTrainedModel, variant: str) -> None:
        self._model, self._settings = model, VARIANTS[variant]
        self._engines: dict[int, RolloutEngine] = {}

    def __call__(self, case: Case) -> Any:
        if case.slots not in self._engines:
            longest = max(len(p) + b for p, b in zip(case.prompts, case.budgets, strict=True))
            self.close()
            config = RolloutConfig(max_slots=case.slots, max_length=max(1024, longest), profile=True, **self._settings)
            self._engines[case.slots] = RolloutEngine(self._model, config=config)
        return self._engines[case.slots].generate(case.prompts, case.sampling)

    def close(self) -> None:
        for engine in self._engines.values():
            engine.shutdown()
        self._engines.clear()


def padded(case: Case, chunk: range, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Left-padded prompts of a part of a case's rows, their mask, and the longest budget."""
    rows = [(p, b) for p, b in zip(case.prompts, case.budgets, strict=True) for _ in range(case.samples)]
    rows = [rows[index] for index in chunk]
    width = max(len(prompt) for prompt, _ in rows)
    ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in rows], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in rows], device=device)
    return ids, mask, max(budget for _, budget in rows)


def chunks(case: Case) -> Iterator[range]:
    total = len(case.prompts) * case.samples
    for start in range(0, total, case.slots):
        yield range(start, min(start + case.slots, total))


def generate(model: PreTrainedModel, **extra: Any) -> Run:
    """`model.generate` over padded batches, each run to its longest answer."""

    def run(case: Case) -> None:
        for chunk in chunks(case):
            ids, mask, budget = padded(case, chunk, model.device)
            sampling = {"do_sample": True, "top_k": 0, "temperature": 1.0} if case.sampled else {"do_sample": False}
            model.generate(
                ids, attention_mask=mask, max_new_tokens=budget, eos_token_id=None, pad_token_id=0, **sampling, **extra
            )

    return run


def generate_batch(model: PreTrainedModel, *, persistent: bool) -> Run:
    """Transformers' continuous batching: its manager kept with graphs, or made anew for each call as trainers do."""

    def run(case: Case) -> None:
        sampling = {"do_sample": True, "top_k": 0, "temperature": 1.0} if case.sampled else {"do_sample": False}
        config = GenerationConfig(max_new_tokens=max(case.budgets), eos_token_id=-1, pad_token_id=0, **sampling)
        settings: dict[str, Any] = {"use_cuda_graph": True, "max_memory_percent": 0.5} if persistent else {}
        prompts = [prompt for prompt in case.prompts for _ in range(case.samples)]
        model.generate_batch(
            inputs=prompts,
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(**settings),
            persistent_manager=persistent,
        )

    return run


def hybrid_engine(model: PreTrainedModel, *, graph: bool) -> Run:
    """DeepSpeed's `HybridEngineRollout`, which needs no more of an engine than its module."""
    from deepspeed.runtime.rollout.base import RolloutRequest
    from deepspeed.runtime.rollout.base import SamplingConfig as TheirSampling
    from deepspeed.runtime.rollout.hybrid_engine_rollout import HybridEngineRollout, HybridEngineRolloutConfig

    tokenizer = types.SimpleNamespace(pad_token_id=0, eos_token_id=None)
    config = HybridEngineRolloutConfig(use_graph_capture=graph)
    rollout = HybridEngineRollout(types.SimpleNamespace(module=model), tokenizer, config)

    def run(case: Case) -> None:
        for chunk in chunks(case):
            ids, mask, budget = padded(case, chunk, model.device)
            sampling = TheirSampling(max_new_tokens=budget, temperature=1.0 if case.sampled else 0.0)
            rollout.generate(RolloutRequest(ids, mask), sampling)

    return run


PEERS: dict[str, Callable[[PreTrainedModel], Run]] = {
    "model.generate": generate,
    "model.generate, static cache": lambda model: generate(model, cache_implementation="static"),
    "generate_batch, kept": lambda model: generate_batch(model, persistent=True),
    "generate_batch, as trainers": lambda model: generate_batch(model, persistent=False),
    "DeepSpeed": lambda model: hybrid_engine(model, graph=False),
    "DeepSpeed, graph": lambda model: hybrid_engine(model, graph=True),
}

SETTING_UP = {"model.generate, static cache", "generate_batch, kept", "DeepSpeed, graph"}
"""Peers that compile or capture in the first call of a case."""


def find_deepspeed(folder: Path | None) -> None:
    """Make DeepSpeed's rollout files importable from a folder of its sources, where the package is not installed."""
    if folder is None or importlib.util.find_spec("deepspeed") is not None:
        return
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.rollout", "deepspeed.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    accelerator = types.ModuleType("deepspeed.accelerator")
    accelerator.get_accelerator = _Accelerator  # type: ignore[attr-defined]
    sys.modules["deepspeed.accelerator"] = accelerator


class _Accelerator:
    """What the rollout files ask of DeepSpeed's accelerator, on CUDA."""

    Stream = torch.cuda.Stream
    Event = torch.cuda.Event
    create_graph = torch.cuda.CUDAGraph
    current_stream = staticmethod(torch.cuda.current_stream)
    stream = staticmethod(torch.cuda.stream)
    synchronize = staticmethod(torch.cuda.synchronize)
    capture_to_graph = staticmethod(torch.cuda.graph)

    @staticmethod
    def replay_graph(graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()


def clear() -> None:
    """Give cached memory back, so that peaks and set-ups of one contender are not another's."""
    gc.collect()
    torch.cuda.empty_cache()
