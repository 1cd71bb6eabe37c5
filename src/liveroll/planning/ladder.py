"""The batch sizes that decode steps are captured at."""

from __future__ import annotations


def ladder(slots: int) -> tuple[int, ...]:
    """The rungs up to `slots`: 1, 2, 4, then multiples of 8, and `slots` itself.

    Steps of 8 rows cost a captured step little: the matrix units of current GPUs work on tiles of at least 8 rows.
    """
    rungs = {1, 2, 4, *range(8, slots, 8), slots}
    return tuple(sorted(rung for rung in rungs if rung <= slots))


def rung_for(rows: int, rungs: tuple[int, ...]) -> int:
    """The smallest rung that holds `rows` rows.

    Raises:
        ValueError: none does.
    """
    for rung in rungs:
        if rung >= rows:
            return rung
    raise ValueError(f"{rows} rows are more than the highest rung, {rungs[-1]}")
