"""Costs measured for the engines of this user, kept by what they are costs of."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedModel

from liveroll.config import RolloutConfig
from liveroll.errors import ConfigError
from liveroll.model.identity import describe_origin
from liveroll.planning.costs import CostModel
from liveroll.planning.costs_file import CostsOrigin, check_origin, read_costs, write_costs
from liveroll.tools.calibrate import Calibration, calibrate, longest_prompt, range_of

logger = logging.getLogger("liveroll")

# What the first call of an engine may wait for, about.
_SECONDS = 12.0


def find_or_measure(model: PreTrainedModel, config: RolloutConfig) -> CostModel:
    """The costs of a model under a configuration, measured now unless an engine of this user has measured them.

    Args:
        model: the model, not in rollout mode.
        config: the engine's.

    Raises:
        LiverollError: as `calibrate` raises.
    """
    origin = describe_origin(model, config, ranks=1)
    path = cache_folder() / _name_of(origin, longest_prompt(model, config), config)
    try:
        found = read_costs(path)
        check_origin(path, found.origin, origin)
        return found.coefficients
    except ConfigError as error:
        logger.debug("%s", error)
    logger.info("measuring what routes cost for %s", type(model).__name__)
    measured = _measure(model, config)
    logger.info("measured in %.1f s", measured.seconds)
    try:
        write_costs(path, measured.file)
    except OSError as error:
        logger.warning("cannot keep the costs measured for later engines: %s", error)
    return measured.costs


def cache_folder() -> Path:
    """Where they are kept: `liveroll/costs` in `XDG_CACHE_HOME` where that is an absolute path, else in `~/.cache`.

    As the XDG Base Directory Specification says, version 0.8.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "liveroll" / "costs"


def _measure(model: PreTrainedModel, config: RolloutConfig) -> Calibration:
    """Calibrate over the calls that the engine takes, or over as large a part of them as forwards have memory for."""
    work = range_of(model, config)
    while True:
        try:
            return calibrate(model, work, config, seconds=_SECONDS)
        except ConfigError as error:
            less = work.halved()
            if less is None or not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
        work = less


def _name_of(origin: CostsOrigin, longest: int, config: RolloutConfig) -> str:
    key = json.dumps([asdict(origin), longest, config.max_slots, config.prefill_max_tokens], sort_keys=True)
    return f"{origin.model_type}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
