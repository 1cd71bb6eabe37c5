"""Which random stream each sample of a call draws from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct

import numpy as np

_KEYS = Struct("<ii")


def assign_streams(
    prompts: Sequence[np.ndarray], counts: Sequence[int], seeds: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """Two 32-bit keys for every sample of every prompt.

    A stream depends on the seed, the prompt's tokens, and how many samples of the same prompt and seed came
    before it in the call. So the order of the prompts does not matter, and a prompt given eight times draws what
    it draws when it is given once with eight samples.

    Args:
        prompts: int64 token ids of each prompt.
        counts: samples of each prompt.
        seeds: seed of each prompt.

    Returns:
        For each prompt, the keys of its samples.
    """
    before: Counter[bytes] = Counter()
    streams = []
    for prompt, count, seed in zip(prompts, counts, seeds, strict=True):
        origin = blake2b(f"{seed}:".encode() + prompt.astype("<i8", copy=False).tobytes()).digest()
        streams.append([_keys(origin, before[origin] + sample) for sample in range(count)])
        before[origin] += count
    return streams


def call_seed(engine_seed: int, call: int) -> int:
    """Seed of an engine's call that was given none."""
    return int.from_bytes(blake2b(f"call {engine_seed}:{call}".encode(), digest_size=8).digest(), "little")


def _keys(origin: bytes, occurrence: int) -> tuple[int, int]:
    first, second = _KEYS.unpack(blake2b(origin + occurrence.to_bytes(8, "little"), digest_size=8).digest())
    return first, second
