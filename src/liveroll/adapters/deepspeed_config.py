"""DeepSpeed's rollout options, by its names and in its order, and what they mean to the engine.

The names are those of `deepspeed.runtime.rollout` 0.19.8 and of its cost-based prefill. Its dataclasses can be changed
after they were made, so these can be too: they are checked when they are made, and again when they are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from liveroll import config as engine_config
from liveroll import sampling_config
from liveroll.config_checks import check_flag, check_number, check_whole, naming_unknown_options
from liveroll.errors import ConfigError
from liveroll.planning.costs import CostModel

ENGINE = "hybrid_engine"
"""The one rollout engine that DeepSpeed's factory knows."""


@naming_unknown_options
@dataclass
class HybridEngineRolloutConfig:
    """How a `HybridEngineRollout` runs.

    Args:
        use_graph_capture: capture decode steps. Sampling, several samples a prompt, refills and prompts of any width
            are captured too.
        enable_profiling: say where the time of a call went, in `get_last_profile`.
        use_shared_prefill: of no effect: the samples of a prompt always share its prefill.
        align_decode_fronts: of no effect: every row has a position of its own, so there is no front to align.
        enable_cache_trimming: nothing to trim: a row holds the pages that it uses. Keeps `adaptive_prefill` from
            ordinary generation, as in DeepSpeed.
        continuous_cache_capacity: tokens (prompt without padding, and response) that a row may hold. One storage and
            one set of captured steps then serve calls of every shape. Keeps `adaptive_prefill` from ordinary
            generation, as in DeepSpeed.
        adaptive_prefill: compare ordinary generation with bucketed prefills by the costs below, and take the cheaper.
        prefill_fixed_cost_ms: milliseconds of a prefill forward, whatever it runs over.
        prefill_token_cost_ms: milliseconds of a token position in it, padding included.
        prefill_attention_cost_ms: milliseconds of 10^9 floating-point operations of attention in it.
        prefill_kv_cost_ms: milliseconds of storing 2^20 bytes of keys and values.
        continuous_decode_cost_ms: milliseconds that a continuous decode step takes longer than an ordinary one.
        prefill_max_tokens: token positions, padding included, in one prefill forward; None removes the limit.

    Raises:
        ConfigError: an option is unknown or out of range.
    """

    use_graph_capture: bool = False
    enable_profiling: bool = False
    use_shared_prefill: bool = False
    align_decode_fronts: bool = False
    enable_cache_trimming: bool = False
    continuous_cache_capacity: int | None = None
    adaptive_prefill: bool = False
    prefill_fixed_cost_ms: float = 25.0
    prefill_token_cost_ms: float = 0.1
    prefill_attention_cost_ms: float = 0.01
    prefill_kv_cost_ms: float = 0.04
    continuous_decode_cost_ms: float = 10.0
    prefill_max_tokens: int | None = 65536

    def __post_init__(self) -> None:
        for name in ("use_graph_capture", "enable_profiling", "use_shared_prefill", "align_decode_fronts"):
            check_flag(self, name)
        check_flag(self, "enable_cache_trimming")
        check_whole(self, "continuous_cache_capacity", low=2, optional=True)
        check_flag(self, "adaptive_prefill")
        for name in ("fixed", "token", "attention", "kv"):
            check_number(self, f"prefill_{name}_cost_ms", low=0.0)
        check_number(self, "continuous_decode_cost_ms", low=0.0)
        check_whole(self, "prefill_max_tokens", low=1, optional=True)

    def over(self, base: engine_config.RolloutConfig | None) -> engine_config.RolloutConfig:
        """The engine's configuration: these options, and what they say nothing of from `base`."""
        start = base or engine_config.RolloutConfig()
        settings: dict[str, Any] = {
            "capture": (start.capture or "auto") if self.use_graph_capture else False,
            "profile": self.enable_profiling,
            "max_length": self.continuous_cache_capacity or start.max_length,
        }
        if self.adaptive_prefill:
            settings |= {
                "prefill_route": "auto",
                "costs": self._costs(),
                "prefill_max_tokens": self.prefill_max_tokens,
                "auto_routes": start.auto_routes if start.prefill_route == "auto" else self._routes(),
            }
        return replace(start, **settings)

    def _costs(self) -> CostModel:
        return CostModel(
            fixed_ms=self.prefill_fixed_cost_ms,
            token_ms=self.prefill_token_cost_ms,
            attention_ms_per_gflop=self.prefill_attention_cost_ms,
            kv_ms_per_mib=self.prefill_kv_cost_ms,
            decode_step_ms=self.continuous_decode_cost_ms,
            max_tokens=self.prefill_max_tokens,
        )

    def _routes(self) -> tuple[engine_config.Route, ...]:
        fixed = self.enable_cache_trimming or self.continuous_cache_capacity is not None
        return ("bucketed",) if fixed else ("bucketed", "ordinary")


@naming_unknown_options
@dataclass
class RolloutConfig:
    """What `build_rollout` is given.

    Args:
        engine: `hybrid_engine`, the only one.
        use_graph_capture: as in `HybridEngineRolloutConfig`.
    """

    engine: str = ENGINE
    use_graph_capture: bool = False


@naming_unknown_options
@dataclass
class SamplingConfig:
    """What to generate. All else is as `model.generate` would take it from the model's generation configuration.

    Args:
        max_new_tokens: tokens to sample, at most.
        temperature: divides the logits; 0 or less is greedy.
        top_p: keep the smallest set of most likely tokens whose probability reaches p.
        top_k: keep the k most likely tokens; 0 or less keeps all.
        n_samples_per_prompt: samples of each prompt, beside each other in the batch.
        continuous_batch_size: rows that decode side by side, at most; None lets all of a call do so.

    Raises:
        ConfigError: an option is unknown or out of range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n_samples_per_prompt: int = 1
    continuous_batch_size: int | None = None

    def __post_init__(self) -> None:
        check_whole(self, "continuous_batch_size", low=1, optional=True)
        check_whole(self, "n_samples_per_prompt", low=1)
        check_number(self, "temperature", low=-math.inf)
        check_number(self, "top_p", low=0.0, high=1.0, low_open=True)
        check_whole(self, "top_k", low=-math.inf)
        self.resolve((), None)

    def resolve(self, stop_token_ids: tuple[int, ...], seed: int | None) -> sampling_config.SamplingConfig:
        """The engine's settings."""
        greedy = self.temperature <= 0
        return sampling_config.SamplingConfig(
            max_new_tokens=self.max_new_tokens,
            temperature=0.0 if greedy else self.temperature,
            top_p=None if greedy else self.top_p,
            top_k=None if greedy else max(self.top_k, 0),
            n=self.n_samples_per_prompt,
            stop_token_ids=stop_token_ids,
            seed=seed,
        )


def read_config(given: Any) -> HybridEngineRolloutConfig:
    """The options in a configuration of ours or DeepSpeed's, a mapping, or any object with options as attributes.

    Raises:
        ConfigError: an option is unknown or out of range.
    """
    if given is None:
        return HybridEngineRolloutConfig()
    if isinstance(given, HybridEngineRolloutConfig):
        return replace(given)
    if not isinstance(given, Mapping) and not hasattr(given, "__dict__"):
        raise ConfigError(f"cfg must be a HybridEngineRolloutConfig, not {given!r}")
    options = dict(given) if isinstance(given, Mapping) else _attributes(given, HybridEngineRolloutConfig)
    check_engine(options.pop("engine", ENGINE))
    return HybridEngineRolloutConfig(**options)


def read_sampling(given: Any) -> SamplingConfig:
    """The settings in a configuration of ours or DeepSpeed's.

    Raises:
        ConfigError: one is unknown or out of range.
    """
    if not hasattr(given, "__dict__"):
        raise ConfigError(f"sampling must be a SamplingConfig, not {given!r}")
    return SamplingConfig(**_attributes(given, SamplingConfig))


def _attributes(given: Any, kind: type[HybridEngineRolloutConfig | SamplingConfig]) -> dict[str, Any]:
    """All that was set on an object, and the options that its class sets."""
    options = {field.name: getattr(given, field.name) for field in fields(kind) if hasattr(given, field.name)}
    options.update(vars(given))
    return options


def check_engine(name: Any) -> None:
    """Refuse a rollout engine that DeepSpeed does not have either."""
    if name != ENGINE:
        raise ConfigError(f"unknown rollout engine {name!r}; choose {ENGINE!r}")
