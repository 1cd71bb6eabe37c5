"""The file that a sweep is kept in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from liveroll.errors import ConfigError
from liveroll.planning.fit import Measurement
from liveroll.planning.json_file import read_json, write_json
from liveroll.tools.outputs import writing
from liveroll.tools.sweep_result import AUTO_PADDED, CONTENDERS, MANUAL, BucketShape, Case, RouteResult, SweepResult

_PARTS: Sequence[str] = ("origin", "coefficients", "points", "settings")
_FIELDS = tuple(entry.name for entry in fields(RouteResult))
_LARGEST = sys.float_info.max  # JSON may hold larger whole numbers, which cannot be divided
_COUNTS = ("prefill_forwards", "prefill_tokens", "padded_tokens", "decode_steps")


def write_sweep(path: Path, sweep: SweepResult) -> None:
    """Write a sweep as JSON, with what follows from its times.

    Raises:
        ConfigError: the file cannot be written.
    """
    cases = [
        {
            "workload": case.workload,
            "lengths": case.lengths,
            "new_tokens": case.new_tokens,
            "buckets": [asdict(bucket) for bucket in case.buckets],
            "best": case.best(),
            "auto_ratio": case.ratio(),
            "auto_without_packed_ratio": case.ratio(AUTO_PADDED),
            "noise": case.noise,
            "routes": {
                name: {
                    "least_ms": result.least_ms,
                    "tokens_per_second": case.tokens_per_second(name),
                    **asdict(result),
                }
                for name, result in case.results.items()
            },
        }
        for case in sweep.cases
    ]
    content = {**{name: getattr(sweep, name) for name in _PARTS}, "cases": cases, "summary": sweep.summary()}
    with writing(path):
        write_json(path, content)


def read_sweep(path: Path) -> SweepResult:
    """Read a file that `write_sweep` wrote.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    content = read_json(path, "sweep")
    try:
        _expect(isinstance(content, dict), "it is no object")
        for name in ("origin", "coefficients", "settings"):
            _expect(isinstance(content[name], dict), f"{name} is no object")
        for point in content["points"]:
            _check_point(point)
        cases = [_case_of(case) for case in content["cases"]]
        _expect(bool(cases), "it has no cases")
        return SweepResult(**{name: content[name] for name in _PARTS}, cases=cases)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        named = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} is no sweep that `liveroll sweep` wrote: {named}") from error


def _case_of(content: dict[str, Any]) -> Case:
    routes = content["routes"]
    case = Case(
        workload=content["workload"],
        lengths=tuple(content["lengths"]),
        new_tokens=content["new_tokens"],
        buckets=tuple(BucketShape(bucket["width"], tuple(bucket["lengths"])) for bucket in content["buckets"]),
        results={name: RouteResult(**{key: routes[name][key] for key in _FIELDS}) for name in CONTENDERS},
    )
    where = f"workload {case.workload!r}"
    _expect(isinstance(case.workload, str), f"{where} has no name")
    _expect(_are_counts(case.lengths, case.new_tokens), f"{where} has no lengths or no budget")
    _expect(bool(case.buckets), f"{where} has no buckets")
    for bucket in case.buckets:
        _expect(_are_counts(bucket.lengths, bucket.width), f"{where} has a bucket without prompts or width")
    for name, result in case.results.items():
        _check_result(result, f"{name} of {where}")
    return case


def _check_result(result: RouteResult, where: str) -> None:
    times = result.ms if result.extended_ms is None else [result.extended_ms]
    _expect(bool(times) and all(map(_is_time, times)), f"{where} has no times, or some that are not positive numbers")
    _expect(_is_time(result.predicted_ms, low_open=False), f"{where} has an estimate that is no number of at least 0")
    _expect(result.taken in MANUAL, f"{where} took {result.taken!r}, which is no route")
    _expect(result.same_as in ("", *MANUAL), f"{where} does the work of {result.same_as!r}, which is no route")
    for name in _COUNTS:
        _expect(_is_count(getattr(result, name)), f"{where} has a number of {name} that is none")
    _expect(result.peak_bytes is None or _is_count(result.peak_bytes), f"{where} has peak_bytes that are no number")
    share = result.agreement
    _expect(share is None or (_is_time(share, low_open=False) and share <= 1), f"{where} has an agreement of no share")


def _check_point(point: dict[str, Any]) -> None:
    measured = Measurement(**{name: value for name, value in point.items() if name != "predicted_ms"})
    _expect(_is_time(measured.ms) and _is_time(point["predicted_ms"], low_open=False), "a point has no times")


def _are_counts(lengths: Sequence[Any], *others: Any) -> bool:
    return bool(lengths) and all(_is_count(value) and value >= 1 for value in (*lengths, *others))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= _LARGEST


def _is_time(value: Any, *, low_open: bool = True) -> bool:
    return isinstance(value, int | float) and (value > 0 if low_open else value >= 0) and value <= _LARGEST


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
