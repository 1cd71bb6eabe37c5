"""Reading a file of prompts: each line becomes a `Job` or a numbered complaint, before anything runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from liveroll.errors import ConfigError, PromptError
from liveroll.sampling_config import SamplingConfig

PROMPT_KEYS = ("prompt", "messages", "prompt_ids")
_ONE_OF = ", ".join(PROMPT_KEYS)
SAMPLING_KEYS = tuple(field.name for field in fields(SamplingConfig))

Message = dict[str, Any]
Prompt = str | list[int] | list[Message]


@dataclass(frozen=True)
class Job:
    """One line of the prompts file.

    Attributes:
        index: zero-based position of the line in the file, blank and bad lines counted.
        id: the line's `id`, or its one-based line number.
        prompt: a text, a list of chat messages, or a list of token ids.
        sampling: the run's settings with the line's own over them, and the line's own seed.
    """

    index: int
    id: str | int
    prompt: Prompt
    sampling: SamplingConfig


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be run: its one-based number, and what is wrong with it."""

    number: int
    reason: str


@dataclass(frozen=True)
class JobFile:
    """What a prompts file holds.

    Attributes:
        path: where it was read from.
        jobs: the good lines, in order.
        bad: the others.
        sha256: hex digest of the file's bytes.
    """

    path: Path
    jobs: tuple[Job, ...]
    bad: tuple[BadLine, ...]
    sha256: str


def read_jobs(path: Path, sampling: SamplingConfig) -> JobFile:
    """Read a prompts file, one JSON object a line; blank lines are passed over.

    Line `i` (zero-based) gets the seed `sampling.seed + i` unless it sets one, so that a resumed run draws what
    an uninterrupted one draws, and equal prompts on different lines get different samples.

    Args:
        path: the file, UTF-8.
        sampling: settings for lines that do not set their own; its seed must be given.

    Raises:
        PromptError: the file cannot be read.
        ConfigError: `sampling.seed` is None.
    """
    if sampling.seed is None:
        raise ConfigError("SamplingConfig.seed must be given: each line's seed counts from it")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PromptError(f"cannot read the prompts file {path}: {error.strerror}") from error
    jobs: list[Job] = []
    bad: list[BadLine] = []
    first_with_id: dict[str | int, int] = {}
    first_with_draw: dict[tuple[int | None, str], int] = {}
    # Split on newline bytes alone: str.splitlines would also break at U+2028, which JSON allows in a string.
    for index, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n")):
        if not raw.strip():
            continue
        number = index + 1
        try:
            job = _job_of(raw, index, sampling)
        except (PromptError, ConfigError) as error:
            bad.append(BadLine(number, str(error)))
            continue
        draw = (job.sampling.seed, json.dumps(job.prompt))
        if job.id in first_with_id:
            bad.append(BadLine(number, f"id {job.id!r} is already that of line {first_with_id[job.id]}"))
            continue
        if draw in first_with_draw:
            # The engine tells them apart by their order in a call, and a resumed call has only the second.
            same = f"has the prompt and the seed of line {first_with_draw[draw]}"
            bad.append(BadLine(number, f"{same}; give another seed, or ask there for n samples"))
            continue
        first_with_id[job.id] = number
        first_with_draw[draw] = number
        jobs.append(job)
    return JobFile(path, tuple(jobs), tuple(bad), hashlib.sha256(data).hexdigest())


def refuse_bad_lines(path: Path, bad: Sequence[BadLine], advice: str = "correct the file") -> None:
    """Raise one error that names every bad line.

    Args:
        path: the file.
        bad: its bad lines.
        advice: what to do about them.

    Raises:
        PromptError: `bad` is not empty.
    """
    if bad:
        listed = "\n".join(f"  line {line.number}: {line.reason}" for line in bad)
        lines = "1 bad line" if len(bad) == 1 else f"{len(bad)} bad lines"
        raise PromptError(f"{lines} in {path}; {advice}:\n{listed}")


def _job_of(raw: bytes, index: int, sampling: SamplingConfig) -> Job:
    line = _object_of(raw)
    unknown = sorted(set(line) - {"id", "sampling", *PROMPT_KEYS})
    if unknown:
        raise PromptError(f"unknown key {unknown[0]!r}; a line may have id, sampling and one of {_ONE_OF}")
    given = [key for key in PROMPT_KEYS if key in line]
    if len(given) != 1:
        raise PromptError(f"needs exactly one of {_ONE_OF}; it has {' and '.join(given) or 'none'}")
    return Job(
        index=index,
        id=_id_of(line, index + 1),
        prompt=_CHECKS[given[0]](line[given[0]]),
        sampling=_sampling_of(line.get("sampling", {}), index, sampling),
    )


def _object_of(raw: bytes) -> dict[str, Any]:
    try:
        line = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PromptError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise PromptError(f"not JSON: {error.msg} at column {error.colno}") from error
    except (RecursionError, ValueError) as error:
        raise PromptError(f"not JSON that can be read: {error}") from error
    if not isinstance(line, dict):
        raise PromptError(f"must be a JSON object, not {_kind(line)}")
    if b"\\ud" in raw.lower():
        try:
            json.dumps(line, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError("holds half of a surrogate pair, which is no character") from error
    return line


def _id_of(line: dict[str, Any], number: int) -> str | int:
    if "id" not in line:
        return number
    value = line["id"]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise PromptError(f"id must be a string or a whole number, not {_kind(value)}")
    return value


def _sampling_of(overrides: Any, index: int, sampling: SamplingConfig) -> SamplingConfig:
    if not isinstance(overrides, dict):
        raise PromptError(f"sampling must be a JSON object, not {_kind(overrides)}")
    unknown = sorted(set(overrides) - set(SAMPLING_KEYS))
    if unknown:
        raise PromptError(f"unknown key {unknown[0]!r} in sampling; it may hold {', '.join(SAMPLING_KEYS)}")
    assert sampling.seed is not None
    own = {**overrides}
    if own.get("seed") is None:
        own["seed"] = sampling.seed + index
    return replace(sampling, **own)


def _check_text(value: Any) -> str:
    if not isinstance(value, str):
        raise PromptError(f"prompt must be a string, not {_kind(value)}")
    if not value:
        raise PromptError("prompt is empty")
    return value


def _check_messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise PromptError("messages must be a list of at least one message")
    for place, message in enumerate(value):
        if not isinstance(message, dict):
            raise PromptError(f"messages[{place}] must be a JSON object, not {_kind(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise PromptError(f"messages[{place}] needs {key!r}, a string")
    return value


def _check_ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not value:
        raise PromptError("prompt_ids must be a list of at least one token id")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise PromptError(f"prompt_ids holds {token!r}, which is no token id")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


_CHECKS: dict[str, Callable[[Any], Prompt]] = {
    "prompt": _check_text,
    "messages": _check_messages,
    "prompt_ids": _check_ids,
}
