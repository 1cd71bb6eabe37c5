"""A drop-in for `deepspeed.runtime.rollout`: change the import, and the same script rolls out with liveroll.

Names, arguments and their order are those of DeepSpeed 0.19.8. DeepSpeed itself is not imported: any object whose
`module` is the model will do for an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from liveroll import types
from liveroll.adapters.deepspeed_config import (
    HybridEngineRolloutConfig,
    RolloutConfig,
    SamplingConfig,
    check_engine,
    read_config,
    read_sampling,
)
from liveroll.adapters.deepspeed_reports import describe_continuous, describe_profile
from liveroll.adapters.deepspeed_types import RolloutBatch, RolloutRequest
from liveroll.adapters.packages import load_package
from liveroll.config import RolloutConfig as EngineConfig
from liveroll.config import check_config
from liveroll.distributed.agreement import least_of
from liveroll.distributed.lent import LentGroup
from liveroll.distributed.tensor_parallel import find_group
from liveroll.engine import RolloutEngine as Engine
from liveroll.errors import ConfigError, PromptError
from liveroll.model.unwrap import unwrap

__all__ = [
    "HybridEngineRollout",
    "HybridEngineRolloutConfig",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutRequest",
    "SamplingConfig",
    "build_rollout",
]

# What DeepSpeed keeps beside its rollouts, and what takes ours as they are.
_DEEPSPEED_OWN = ("JSDLossOutput", "ResponseTokenBatch", "generalized_jsd_loss")


class RolloutEngine(ABC):
    """What a trainer asks of a rollout engine: the base class that DeepSpeed has by that name, for one of your own."""

    name: str = "base"

    @abstractmethod
    def generate(self, request: Any, sampling: Any) -> Any:
        """Prompts and responses in one batch."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Take the weights of that step."""

    def shutdown(self) -> None:
        """Free what is held. Nothing, by default."""
        return


class HybridEngineRollout(RolloutEngine):
    """Rolls out the model that a DeepSpeed engine trains: plain, or under ZeRO stage 1 or 2.

    Responses end where `model.generate` ends them, and at the tokenizer's EOS. Random numbers come from PyTorch's
    generator, so `torch.manual_seed` repeats a call. Whatever mode the model is in, it generates in that of
    `engine_config.training_mode`, without dropout by default.

    Args:
        engine: a DeepSpeed engine, or any object whose `module` is the model.
        tokenizer: must have a PAD or an EOS token; nothing else of it is used.
        cfg: a `HybridEngineRolloutConfig`, or anything with options of those names.
        engine_config: settings of liveroll that `cfg` says nothing of. `max_slots` then bounds the rows that decode
            side by side in calls without `continuous_batch_size`, which otherwise all do.

    Raises:
        ConfigError: an option is unknown or out of range, or the tokenizer has neither PAD nor EOS.
        UnsupportedModelError: the model cannot be rolled out.
    """

    name = "liveroll"

    def __init__(
        self, engine: Any, tokenizer: Any, cfg: Any = None, *, engine_config: EngineConfig | None = None
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.cfg = read_config(cfg)
        self._given = None if engine_config is None else check_config(engine_config)
        self._stops = _token_ids(getattr(tokenizer, "eos_token_id", None))
        pads = _token_ids(getattr(tokenizer, "pad_token_id", None)) + self._stops
        if not pads:
            raise ConfigError("the tokenizer has neither a pad nor an eos token; set tokenizer.pad_token")
        self._pad = pads[0]
        self._tp_group = LentGroup(find_group(unwrap(engine.module)))
        self._rollouts = self._make_engine(self.cfg.over(self._given))
        self._profile: dict[str, Any] | None = None
        self._continuous: dict[str, Any] | None = None

    def generate(self, request: Any, sampling: Any) -> RolloutBatch:
        """Generate responses to a left-padded batch of prompts.

        Args:
            request: a `RolloutRequest`, of ours or DeepSpeed's.
            sampling: a `SamplingConfig`, of ours or DeepSpeed's.

        Returns:
            Rows in the order of the request, the samples of a prompt beside each other, on the request's device.

        Raises:
            ConfigError: a setting is unknown or out of range.
            PromptError: a prompt cannot be generated from, or does not fit with its response.
            LiverollError: whatever `liveroll.RolloutEngine.generate` raises.
        """
        settings = read_sampling(sampling)
        for name in ("prompt_ids", "prompt_attention_mask"):
            if not isinstance(getattr(request, name, None), Tensor):
                raise PromptError(f"request.{name} must be a tensor; give a RolloutRequest")
        ids, mask = request.prompt_ids, request.prompt_attention_mask
        seed = self._draw_seed() if settings.temperature > 0 else None
        self._provide(settings, len(ids))
        batch = self._rollouts.generate(types.RolloutRequest(ids, mask), settings.resolve(self._stop_token_ids(), seed))
        slots = self._rollouts.config.max_slots
        self._profile = describe_profile(batch, slots) or self._profile
        if settings.continuous_batch_size is not None:
            self._continuous = describe_continuous(batch, self.cfg.continuous_cache_capacity)
            return self._rows(batch, ids.device, mask.dtype)
        return self._rows(batch, ids.device, torch.int64)

    def sync_weights(self, step: int) -> None:
        """Nothing: the engine reads the weights where they are trained.

        Args:
            step: of no effect.
        """

    def shutdown(self) -> None:
        """Free all that is held between calls. The rollout stays usable, and takes it again at the next call."""
        self._rollouts.shutdown()

    def get_last_profile(self) -> dict[str, Any] | None:
        """Where the time of the last call that was profiled went; None before one."""
        return self._profile

    def get_last_continuous_stats(self) -> dict[str, Any] | None:
        """Cache and speed of the last call with a `continuous_batch_size`; None where `model.generate` did it."""
        return self._continuous

    @property
    def rollouts(self) -> Engine:
        """The engine underneath. Calls of other shapes may replace it by one with more slots."""
        return self._rollouts

    def _provide(self, sampling: SamplingConfig, prompts: int) -> None:
        """Have an engine with as many slots as a call is to use."""
        now = self._rollouts.config.max_slots
        wanted = sampling.continuous_batch_size
        if wanted is None:
            rows = prompts * sampling.n_samples_per_prompt
            wanted = max(now, rows) if self._given is None else self._given.max_slots
        if wanted != now:
            # What the old engine holds goes before the new one takes anything.
            self._rollouts.shutdown()
            self._rollouts = self._make_engine(replace(self._rollouts.config, max_slots=wanted))

    def _draw_seed(self) -> int:
        """A seed from PyTorch's generator, the same on all ranks that hold shards of the model."""
        own = int(torch.randint(2**62, ()))
        return least_of(own, self._tp_group.get(), unwrap(self.engine.module).device)

    def _make_engine(self, config: EngineConfig) -> Engine:
        return Engine(self.engine.module, config=config, tp_group=self._tp_group.get())

    def _stop_token_ids(self) -> tuple[int, ...]:
        own = _token_ids(unwrap(self.engine.module).generation_config.eos_token_id)
        return tuple(dict.fromkeys(own + self._stops))

    def _rows(self, batch: types.RolloutBatch, device: torch.device, mask_dtype: torch.dtype) -> RolloutBatch:
        start = batch.response_start_idx
        ids = batch.input_ids.clone()
        ids[:, start:].masked_fill_(batch.attention_mask[:, start:] == 0, self._pad)
        return RolloutBatch(
            input_ids=ids.to(device),
            attention_mask=batch.attention_mask.to(device, mask_dtype),
            response_start_idx=torch.full((len(batch),), start, dtype=torch.int64, device=device),
            rollout=batch,
        )


def build_rollout(
    rollout_cfg: Any, student_engine: Any = None, tokenizer: Any = None, **kwargs: Any
) -> HybridEngineRollout:
    """Make the rollout engine that a configuration names.

    Args:
        rollout_cfg: a `RolloutConfig`, or a mapping or any object with an `engine`, `"hybrid_engine"`, and options of
            `HybridEngineRolloutConfig`.
        student_engine: the DeepSpeed engine of the model.
        tokenizer: its tokenizer.
        kwargs: `engine_config`, as for `HybridEngineRollout`.

    Raises:
        ConfigError: the configuration names another engine or holds an unknown option, or something is missing.
    """
    mapping = isinstance(rollout_cfg, Mapping)
    check_engine(rollout_cfg.get("engine") if mapping else getattr(rollout_cfg, "engine", None))
    if student_engine is None or tokenizer is None:
        raise ConfigError("a hybrid_engine rollout needs both student_engine and tokenizer")
    if unknown := kwargs.keys() - {"engine_config"}:
        raise ConfigError(f"build_rollout has no option {', '.join(sorted(unknown))}; it has engine_config")
    return HybridEngineRollout(student_engine, tokenizer, rollout_cfg, **kwargs)


def __getattr__(name: str) -> Any:
    """DeepSpeed's own tools for the loss, which take our batches, from DeepSpeed."""
    if name not in _DEEPSPEED_OWN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    load_package("deepspeed", f"{name} is DeepSpeed's own")
    return getattr(import_module("deepspeed.runtime.rollout"), name)


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, Tensor):
        value = value.tolist()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)
