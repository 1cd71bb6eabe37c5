"""liveroll: the Hugging Face model you are training, as a fast rollout engine, in place."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liveroll.completion import Completion
    from liveroll.config import RolloutConfig
    from liveroll.engine import RolloutEngine
    from liveroll.errors import (
        CaptureError,
        CompileError,
        ConfigError,
        EngineStateError,
        FusionError,
        GatherError,
        KVMemoryError,
        LiverollError,
        LogitsError,
        PrefillLimitError,
        PromptError,
        RankError,
        UnsupportedGenerationError,
        UnsupportedModelError,
    )
    from liveroll.planning.buckets import Bucket, plan_buckets
    from liveroll.planning.costs import CostModel
    from liveroll.planning.geometry import ModelGeometry
    from liveroll.planning.routes import RouteCandidate, RoutePlan
    from liveroll.profile import RolloutProfile
    from liveroll.sampling_config import SamplingConfig
    from liveroll.types import (
        ResolvedSampling,
        RolloutBatch,
        RolloutFusion,
        RolloutMemory,
        RolloutRequest,
        RolloutStats,
    )

__version__ = "0.1.0"

_HOMES = {
    "RolloutEngine": "engine",
    "RolloutConfig": "config",
    "SamplingConfig": "sampling_config",
    "Completion": "completion",
    "ResolvedSampling": "types",
    "RolloutBatch": "types",
    "RolloutFusion": "types",
    "RolloutMemory": "types",
    "RolloutProfile": "profile",
    "RolloutRequest": "types",
    "RolloutStats": "types",
    "Bucket": "planning.buckets",
    "plan_buckets": "planning.buckets",
    "CostModel": "planning.costs",
    "ModelGeometry": "planning.geometry",
    "RouteCandidate": "planning.routes",
    "RoutePlan": "planning.routes",
    "CaptureError": "errors",
    "CompileError": "errors",
    "ConfigError": "errors",
    "EngineStateError": "errors",
    "FusionError": "errors",
    "GatherError": "errors",
    "KVMemoryError": "errors",
    "LiverollError": "errors",
    "LogitsError": "errors",
    "PrefillLimitError": "errors",
    "PromptError": "errors",
    "RankError": "errors",
    "UnsupportedGenerationError": "errors",
    "UnsupportedModelError": "errors",
}

__all__ = [
    "Bucket",
    "CaptureError",
    "CompileError",
    "Completion",
    "ConfigError",
    "CostModel",
    "EngineStateError",
    "FusionError",
    "GatherError",
    "KVMemoryError",
    "LiverollError",
    "LogitsError",
    "ModelGeometry",
    "PrefillLimitError",
    "PromptError",
    "RankError",
    "ResolvedSampling",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutFusion",
    "RolloutMemory",
    "RolloutProfile",
    "RolloutRequest",
    "RolloutStats",
    "RouteCandidate",
    "RoutePlan",
    "SamplingConfig",
    "UnsupportedGenerationError",
    "UnsupportedModelError",
    "plan_buckets",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import liveroll` loads neither torch nor transformers."""
    if name not in _HOMES:
        raise AttributeError(f"module 'liveroll' has no attribute {name!r}")
    return getattr(import_module(f"liveroll.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
