"""Files of measured costs: coefficients, what they are costs of, and the measurements they were fitted to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from liveroll.errors import ConfigError
from liveroll.planning.costs import CostModel
from liveroll.planning.geometry import ModelGeometry
from liveroll.planning.json_file import read_json, write_json

_PACKAGE = Path(__file__).parents[1]
_ROOMS = ("kv", "planning", "prefill")
_MEASURING = ("calibrate", "grid", "measure", "quiet", "readings", "workloads")
_KEYS = ("coefficients", "metadata", "points")


@dataclass(frozen=True, kw_only=True)
class CostsOrigin:
    """What costs were measured with; they hold for nothing else.

    Attributes:
        model_type: the architecture, as transformers calls it.
        parameters: parameters of the model in one process.
        geometry: as the model's configuration gives it.
        ranks: processes that hold shards of the model.
        dtype: of the parameters.
        device: name of the device.
        padded_attention: the model's own attention implementation.
        packed_attention: the backend of packed prefill and of decode.
        capture: whether decode steps are captured.
        prefill_capture: tokens up to which packed prefills are captured; 0 where none are.
        compile: whether the forward of what is captured is compiled.
        fuse: whether projections of one input are one product in them.
        liveroll: its version, and so on.
        torch: version.
        transformers: version.
        triton: version, `none` where it is not installed.
        sources: hash over the sources that plan, prefill, store keys and values, and measure.
    """

    model_type: str
    parameters: int
    geometry: ModelGeometry
    ranks: int
    dtype: str
    device: str
    padded_attention: str
    packed_attention: str
    capture: bool
    prefill_capture: int
    compile: bool
    fuse: bool
    liveroll: str
    torch: str
    transformers: str
    triton: str
    sources: str


@dataclass(frozen=True)
class CostsFile:
    """What a file of costs holds.

    Attributes:
        coefficients: the costs.
        origin: what they are costs of; `metadata` in the file.
        points: the measurements they were fitted to, one JSON object each.
    """

    coefficients: CostModel
    origin: CostsOrigin
    points: tuple[dict[str, Any], ...]


def write_costs(path: Path, costs: CostsFile) -> None:
    """Write a file of costs, as `write_json` does.

    Raises:
        OSError: it cannot be written.
        ValueError: a measurement is not a finite number.
    """
    content = {
        "coefficients": asdict(costs.coefficients),
        "metadata": asdict(costs.origin),
        "points": list(costs.points),
    }
    write_json(path, content)


def read_costs(path: Path) -> CostsFile:
    """Read a file of costs.

    Raises:
        ConfigError: it cannot be read, or a field is missing, unknown or out of range.
    """
    content = read_json(path, "costs file")
    try:
        _check_names("the file", content, _KEYS)
        _check_names("coefficients", content["coefficients"], _names(CostModel))
        _check_names("metadata", content["metadata"], _names(CostsOrigin))
        _check_names("metadata.geometry", content["metadata"]["geometry"], _names(ModelGeometry))
        points = content["points"]
        if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
            raise ConfigError("points must be a list of objects")
        geometry = ModelGeometry(**content["metadata"]["geometry"])
        origin = CostsOrigin(**{**content["metadata"], "geometry": geometry})
        return CostsFile(CostModel(**content["coefficients"]), origin, tuple(points))
    except ConfigError as error:
        raise ConfigError(f"the costs file {path} cannot be used: {error}; measure again") from error


def check_origin(path: Path, given: CostsOrigin, here: CostsOrigin) -> None:
    """Refuse costs of something else than what runs here.

    Raises:
        ConfigError: naming each field that differs, with both values.
    """
    differing = [
        f"{name} is {getattr(given, name)!r} there and {getattr(here, name)!r} here"
        for name in _names(CostsOrigin)
        if getattr(given, name) != getattr(here, name)
    ]
    if differing:
        raise ConfigError(f"the costs file {path} was measured with something else: {'; '.join(differing)}")


def fingerprint_sources() -> str:
    """Hash the sources that costs depend on: those that plan, prefill and store keys and values, and that measure."""
    digest = hashlib.sha256()
    paths = [path for room in _ROOMS for path in sorted((_PACKAGE / room).rglob("*.py"))]
    for path in (*paths, *(_PACKAGE / "tools" / f"{name}.py" for name in _MEASURING)):
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


def _check_names(owner: str, content: Any, expected: Sequence[str]) -> None:
    if not isinstance(content, dict):
        raise ConfigError(f"{owner} must be an object")
    missing = [name for name in expected if name not in content]
    unknown = [name for name in content if name not in expected]
    if missing or unknown:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"has unknown {', '.join(unknown)}"] if unknown else []
        raise ConfigError(f"{owner} {' and '.join(parts)}")
