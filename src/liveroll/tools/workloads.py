"""Workloads that routes are compared on: lengths of the prompts of one call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from liveroll.errors import PromptError

SEED = "seed"
"""The name of the workloads below."""


@dataclass(frozen=True)
class Workload:
    """The prompts of one call.

    Attributes:
        name: what to call it.
        lengths: tokens of each prompt.
    """

    name: str
    lengths: tuple[int, ...]


SEED_WORKLOADS = (
    Workload("short", tuple(range(20, 12, -1)) * 4),
    Workload("long tail", (512, *[16] * 31)),
    Workload("short tail", (20, *[1] * 31)),
    Workload("moderate", (128, *[4] * 31)),
    Workload("spread", tuple(range(16, 513, 16))),
    Workload("many", (16,) * 128),
)
"""Like and unlike lengths, with few and with many prompts: what routes differ most on."""


def draw_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts of these lengths, no two alike as far as the vocabulary allows: equal ones would share a prefill.

    Args:
        lengths: tokens of each.
        vocab_size: tokens are below it.
        seed: the same seed draws the same prompts.
    """
    generator = np.random.default_rng(seed)
    prompts = []
    for place, length in enumerate(lengths):
        prompt = generator.integers(vocab_size, size=length).tolist()
        prompt[:2] = [place % vocab_size, place // vocab_size % vocab_size][:length]
        prompts.append(prompt)
    return prompts


def read_workloads(source: str) -> tuple[Workload, ...]:
    """The workloads of a file of JSON lines, each with name and lengths, or those called `seed`.

    Blank lines are passed over.

    Args:
        source: `seed`, or the path of a file.

    Raises:
        PromptError: the file cannot be read, a line is no workload, or there is none; with the line's number.
    """
    if source == SEED:
        return SEED_WORKLOADS
    try:
        lines = Path(source).read_bytes().split(b"\n")
    except OSError as error:
        raise PromptError(f"cannot read the workloads file {source}: {error.strerror}") from error
    found: dict[str, Workload] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            workload = _workload_of(line)
            if workload.name in found:
                raise PromptError(f"there is a workload {workload.name!r} already")
        except PromptError as error:
            raise PromptError(f"line {number} of {source}: {error}") from error
        found[workload.name] = workload
    if not found:
        raise PromptError(f"the workloads file {source} has no workloads")
    return tuple(found.values())


def _workload_of(line: bytes) -> Workload:
    try:
        content: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"not JSON: {error}") from error
    if not isinstance(content, dict) or set(content) != {"name", "lengths"}:
        raise PromptError(
            'must be an object with name and lengths, such as {"name": "long tail", "lengths": [512, 16]}'
        )
    name, lengths = content["name"], content["lengths"]
    if not isinstance(name, str) or not name:
        raise PromptError(f"name must be a string that is not empty, not {name!r}")
    if not name.isprintable():
        raise PromptError(f"name must be of letters that can be printed, not {name!r}")
    if not isinstance(lengths, list) or not lengths:
        raise PromptError(f"lengths must be a list of at least one number, not {lengths!r}")
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise PromptError(f"lengths holds {length!r}; every prompt needs a whole number of tokens, at least 1")
    return Workload(name, tuple(lengths))
