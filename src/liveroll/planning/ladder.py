"""The sizes that forwards are captured at: rows of decode steps, tokens of packed prefills."""

from __future__ import annotations

from bisect import bisect_left


def ladder(slots: int) -> tuple[int, ...]:
    """The rungs up to `slots`: 1, 2, 4, then multiples of 8, and `slots` itself.

    Steps of 8 rows cost a captured step little: the matrix units of current GPUs work on tiles of at least 8 rows.
    """
    rungs = {1, 2, 4, *range(8, slots, 8), slots}
    return tuple(sorted(rung for rung in rungs if rung <= slots))


def token_ladder(most: int) -> tuple[int, ...]:
    """The rungs up to `most`: 64, multiples of 128 up to 512, then four in each doubling, and `most` itself.

    Up to a few hundred tokens a forward takes about what reading the weights takes. Beyond, a forward over n tokens is
    filled up by less than n / 4, by a tenth of it or so on average.
    """
    rungs, step = [min(64, most)], 64
    while rungs[-1] < most:
        rungs.append(min(rungs[-1] + step, most))
        step = max(128, 2 ** (rungs[-1].bit_length() - 1) // 4) if rungs[-1] >= 128 else 64
    return tuple(rungs)


def rung_for(size: int, rungs: tuple[int, ...]) -> int:
    """The smallest rung that holds `size` rows or tokens.

    Raises:
        ValueError: none does.
    """
    place = bisect_left(rungs, size)
    if place == len(rungs):
        raise ValueError(f"{size} is more than the highest rung, {rungs[-1]}")
    return rungs[place]
