"""Learning what forwards and decode steps cost: uniform calls timed, and coefficients fitted to their times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from liveroll.config import RolloutConfig
from liveroll.engine import RolloutEngine
from liveroll.errors import ConfigError
from liveroll.kv.budget import free_bytes
from liveroll.model.identity import declared_geometry, describe_origin
from liveroll.model.unwrap import unwrap
from liveroll.planning.costs import CostModel
from liveroll.planning.costs_file import CostsFile
from liveroll.planning.fit import Measurement, fit_costs, predict_ms
from liveroll.planning.geometry import ModelGeometry
from liveroll.planning.routes import ROUTES
from liveroll.tools.grid import DECODE_STEPS, Cell, WorkloadRange, plan_grid
from liveroll.tools.measure import Pace, Sample, Stopwatch, take_samples
from liveroll.tools.quiet import QuietHost
from liveroll.tools.readings import read_off

# Of the memory that is free, this share may be keys and values; forwards need the rest.
_KV_SHARE = 0.8
_SHORTEST, _LONGEST = 16, 512
_WAITING, _HURRIED_WAITING = 1.0, 0.25
"""What may go into waiting for a quiet host, of the time that calls take: without a limit, and with one."""


@dataclass(frozen=True)
class Calibration:
    """Costs and what they were fitted to.

    Attributes:
        file: the costs with all that says what they are costs of.
        points: what was measured.
        geometry: the model's.
        calls: calls that were timed for them.
        seconds: how long it took.
        setup_seconds: how much of that went into loading kernels, capturing, waiting, and calls not counted.
    """

    file: CostsFile
    points: tuple[Measurement, ...]
    geometry: ModelGeometry
    calls: int
    seconds: float
    setup_seconds: float

    @property
    def costs(self) -> CostModel:
        """The coefficients."""
        return self.file.coefficients


def calibrate(
    model: Any,
    work: WorkloadRange,
    config: RolloutConfig | None = None,
    *,
    repeats: int = 5,
    seconds: float | None = None,
    known: Mapping[str, Sample] | None = None,
    keep: Callable[[Sample], None] = lambda sample: None,
) -> Calibration:
    """Measure a model's costs, here and now.

    The model is left as it was found, and nothing that an engine of it holds is touched. What is measured needs KV
    memory of its own for the largest batch of the range, and gives it back.

    Args:
        model: the model, as an engine is given it.
        work: the calls that the costs are to hold for.
        config: the configuration of the engines that will use them; slots, memory and route are not taken from it.
        repeats: how often each call is timed, at most; those whose times agree are timed twice.
        seconds: what it may take, about; None for no limit. A range that takes longer is halved until it does not.
        known: samples of an earlier run by their ids, which are not taken again.
        keep: called with each new sample.

    Raises:
        ConfigError: the range is more than the model or the memory holds.
        UnsupportedModelError: the engine cannot run the model.
        CaptureError: decode steps must be captured and cannot be.
    """
    config, known = config or RolloutConfig(), known or {}
    own = unwrap(model)
    check_range(work, own, config)
    began = time.perf_counter()

    def seconds_left() -> float:
        return math.inf if seconds is None else seconds - (time.perf_counter() - began)

    with RolloutEngine(model, config=_measuring(config, work)) as engine:
        waiting = _WAITING if seconds is None else _HURRIED_WAITING
        stopwatch = Stopwatch(engine, own.config.get_text_config().vocab_size, QuietHost(waiting))
        try:
            if seconds is not None:
                work = _within(seconds_left, work, Pace.of(stopwatch, work), config)
            cells = plan_grid(work, config.prefill_max_tokens)
            samples = take_samples(stopwatch, cells, repeats, known, keep, seconds_left)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the memory of the device does not hold forwards over {work}; lower max_length or max_batch"
            ) from error
        geometry = stopwatch.geometry
    points = tuple(read_off(samples))
    costs = fit_costs(points, geometry, config.prefill_max_tokens)
    rows = [{**asdict(point), "predicted_ms": predict_ms(point, costs, geometry)} for point in points]
    file = CostsFile(costs, describe_origin(own, config, ranks=1), tuple(rows))
    counted = sum(sample.wall_ms for sample in samples if sample.id not in known) / 1e3
    took = time.perf_counter() - began
    return Calibration(file, points, geometry, len(samples), took, took - counted)


def check_range(work: WorkloadRange, model: PreTrainedModel, config: RolloutConfig) -> None:
    """Refuse a range that cannot be measured.

    Raises:
        ConfigError: the model's context, a forward or the memory does not hold it; with the numbers.
    """
    for name, limit in _row_limits(model, config).items():
        if work.row_tokens > limit:
            way_out = "lower max_length" if work.max_length > 1 else "raise it, or give costs as a CostModel"
            raise ConfigError(
                f"prompts of {work.max_length} tokens and the {work.row_tokens - work.max_length} that are measured "
                f"behind them do not fit {name}, {limit}; {way_out}"
            )
    if config.prefill_max_tokens is not None and work.max_length > config.prefill_max_tokens:
        raise ConfigError(
            f"prompts of {work.max_length} tokens are over prefill_max_tokens, {config.prefill_max_tokens}; "
            "lower max_length, or raise the limit"
        )
    needed, free = _kv_bytes(work, model, config), free_bytes(model.device)
    if needed > free * _KV_SHARE:
        raise ConfigError(
            f"keys and values of {work.max_batch} rows of {work.row_tokens} tokens take {needed / 2**30:.2f} GiB, and "
            f"{free / 2**30:.2f} GiB of memory are free; lower max_batch or max_length"
        )


def longest_prompt(model: PreTrainedModel, config: RolloutConfig) -> int:
    """The longest prompt that is measured where none is named: 512 tokens, or what the model and engine allow."""
    limits = [limit - DECODE_STEPS - 1 for limit in _row_limits(model, config).values()]
    limits += [] if config.prefill_max_tokens is None else [config.prefill_max_tokens]
    return max(min([_LONGEST, *limits]), 1)


def range_of(model: PreTrainedModel, config: RolloutConfig) -> WorkloadRange:
    """The calls that an engine of this configuration takes, as far as the memory that is free holds them."""
    length = longest_prompt(model, config)
    work = WorkloadRange(min_length=min(_SHORTEST, length), max_length=length, max_batch=config.max_slots)
    while _kv_bytes(work, model, config) > free_bytes(model.device) * _KV_SHARE / 2 and (less := work.halved()):
        work = less
    return work


def _within(seconds_left: Callable[[], float], work: WorkloadRange, pace: Pace, config: RolloutConfig) -> WorkloadRange:
    """As large a part of a range as can be measured twice, where it is needed, in the time that is left."""

    def needed(work: WorkloadRange) -> list[Cell]:
        return [cell for cell in plan_grid(work, config.prefill_max_tokens) if cell.needed]

    while 2 * pace.seconds_of(needed(work)) > seconds_left() and (less := work.halved()):
        work = less
    return work


def _row_limits(model: PreTrainedModel, config: RolloutConfig) -> dict[str, int]:
    """Tokens that a row may hold, by what limits them."""
    limits = {
        "the model's max_position_embeddings": getattr(model.config.get_text_config(), "max_position_embeddings", None),
        "RolloutConfig.max_length": config.max_length,
    }
    return {name: limit for name, limit in limits.items() if limit is not None}


def _kv_bytes(work: WorkloadRange, model: PreTrainedModel, config: RolloutConfig) -> int:
    geometry = declared_geometry(model)
    return _kv_tokens(work, config) * 2 * geometry.kv_width * geometry.element_bytes


def _kv_tokens(work: WorkloadRange, config: RolloutConfig) -> int:
    return work.max_batch * -(-work.row_tokens // config.page_size) * config.page_size


def _measuring(config: RolloutConfig, work: WorkloadRange) -> RolloutConfig:
    """The configuration of the engine that is timed."""
    return replace(
        config,
        max_slots=work.max_batch,
        max_length=work.row_tokens,
        kv_tokens=_kv_tokens(work, config),
        kv_bytes=None,
        kv_fraction=None,
        prefill_route="packed",
        auto_routes=ROUTES,
        costs=None,
        # While a device works on a long prefill, only so many launches wait for it: those of eager steps that run ahead
        # would be held up, and the prefill count to them once more.
        run_ahead=0 if config.capture is False else config.run_ahead,
        fallback="error",
        progress=False,
        profile=True,
    )
