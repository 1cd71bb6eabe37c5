"""Which contenders of a sweep are called, and how often: calls go where the fastest is not known yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from liveroll.tools.sweep_result import AUTO, AUTO_PADDED, CONTENDERS, MANUAL, TOLERANCE, Case, RouteResult

LONG_MS = 1000.0
"""Calls expected to take longer are not warmed up, nor run where others have told what they would."""

_NEAR, _FAR = 1.1, 1.5


def leave_out(case: Case, earlier: Sequence[Case]) -> None:
    """Settle long calls of a case that need not be run, by the same workload's cases at smaller budgets.

    A manual route is left out that two smaller budgets, extended in a straight line, show to be more than a tenth
    behind. A contender other than `auto` that does the same work as one that is run is given that one's times.

    Args:
        case: not run yet.
        earlier: of its workload, in ascending order of budgets.
    """
    results = case.results
    expected = {name: expected_ms(case, earlier, name) for name in CONTENDERS}
    if len(earlier) >= 2:
        least = min(expected[route] for route in MANUAL if route != "packed")
        for name in MANUAL:
            if expected[name] > max(_NEAR * least, LONG_MS):
                before = earlier[-1].results[name]
                results[name] = replace(
                    before,
                    predicted_ms=results[name].predicted_ms,
                    ms=[],
                    peak_bytes=None,
                    decode_steps=case.new_tokens - 1,
                    agreement=None,
                    borrowed=False,
                    extended_ms=expected[name],
                )
    for contender in CONTENDERS:
        source = results.get(results[contender].same_as)
        if contender == AUTO or source is None or source.extended_ms is not None or source.borrowed:
            continue
        if results[contender].extended_ms is None and expected[contender] > LONG_MS:
            results[contender].borrowed = True
            results[contender].ms = source.ms  # one list for both, as it grows


def expected_ms(case: Case, earlier: Sequence[Case], name: str) -> float:
    """What a contender is expected to take: its times at the two budgets before, extended in a straight line.

    Before there are two, what the costs estimate.
    """
    if len(earlier) < 2:
        return case.results[name].predicted_ms
    (low, low_ms), (high, high_ms) = ((other.new_tokens, other.results[name].least_ms) for other in earlier[-2:])
    return high_ms + (high_ms - low_ms) / (high - low) * (case.new_tokens - high)


def runs_in(case: Case) -> list[str]:
    """The contenders of a case that are called at all."""
    return [name for name, result in case.results.items() if result.extended_ms is None and not result.borrowed]


def next_round(case: Case, repeats: int, ms_left: float) -> list[str]:
    """Contenders to call once more, after each has been called; none where the case is done.

    These are `auto` and the routes that may be the fastest, with or without packed ones: their least time is within a
    tenth of the fastest one's, or a single time within half of it. They are called as long as that fits the
    time that is left. After that, where `auto` seems too far behind, only it and the route that it is behind, so that
    no verdict hangs on a disturbed call.

    Args:
        case: the case.
        repeats: calls of each, at most.
        ms_left: what the repeats of the case may still take.
    """
    results = {name: case.results[name] for name in runs_in(case) if len(case.results[name].ms) < repeats}
    near = [name for name, result in results.items() if result.least_ms <= _reach(result) * _best_ms(case, name)]
    near += [name for name in (AUTO, AUTO_PADDED) if name in results and name not in near]
    if near and sum(results[name].least_ms for name in near) <= ms_left:
        return near
    doubtful: dict[str, None] = {}
    for contender in (AUTO, AUTO_PADDED):
        if case.ratio(contender) > TOLERANCE:
            doubtful.update({contender: None, case.best(contender): None})
    return [name for name in doubtful if name in results]


def _reach(result: RouteResult) -> float:
    """How far behind the fastest a contender may be to be called again; one call says less than two."""
    return _FAR if len(result.ms) == 1 else _NEAR


def _best_ms(case: Case, name: str) -> float:
    """What the fastest manual route takes, or for others than packed ones the fastest that is not packed."""
    rival = AUTO if name in (AUTO, "packed") else AUTO_PADDED
    return case.results[case.best(rival)].least_ms
