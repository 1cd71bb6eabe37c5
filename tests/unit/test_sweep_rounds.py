"""Which contenders of a sweep are called, and how often."""

from __future__ import annotations

import dataclasses
import math

import pytest
import zoo

from liveroll import RolloutConfig, RolloutEngine
from liveroll.planning.costs_file import write_costs
from liveroll.tools import sweep as sweep_module
from liveroll.tools import sweep_calls, sweep_rounds
from liveroll.tools.calibrate import calibrate
from liveroll.tools.grid import WorkloadRange
from liveroll.tools.quiet import QuietHost
from liveroll.tools.reference import Reference
from liveroll.tools.sweep import sweep
from liveroll.tools.sweep_calls import Track
from liveroll.tools.sweep_file import read_sweep, write_sweep
from liveroll.tools.sweep_report import write_report
from liveroll.tools.sweep_result import (
    AUTO,
    AUTO_PADDED,
    CONTENDERS,
    BucketShape,
    Case,
    RouteResult,
    SweepResult,
)
from liveroll.tools.sweep_rounds import expected_ms, leave_out, next_round, runs_in
from liveroll.tools.workloads import Workload

MODEL = zoo.build("llama")
SAME = {"equal_width": "bucketed", AUTO: "packed", AUTO_PADDED: "bucketed"}


def case_of(times, new_tokens=2, predicted=10.0):
    """A case; where a contender is not named its one time is 1000 ms."""
    results = {
        name: RouteResult(predicted, name, list(times.get(name, [1000.0])), same_as=SAME.get(name, ""))
        for name in CONTENDERS
    }
    return Case("w", (8, 8), new_tokens, (BucketShape(8, (8, 8)),), results)


def unrun(new_tokens, predicted=10.0):
    case = case_of({}, new_tokens, predicted)
    for result in case.results.values():
        result.ms.clear()
    return case


def test_the_fastest_are_called_again():
    """Guards against repeats of what is settled, and against a best route, with or without packed, by one call."""
    times = {"packed": [100.0], AUTO: [104.0], "bucketed": [160.0], "equal_width": [149.0], AUTO_PADDED: [500.0]}
    once = case_of({**times, "per_prompt": [151.0], "ordinary": [900.0]})
    assert set(next_round(once, 3, math.inf)) == {"packed", AUTO, "bucketed", "equal_width", "per_prompt", AUTO_PADDED}
    twice = case_of({name: ms * 2 for name, ms in {**times, "per_prompt": [170.0], "ordinary": [225.0]}.items()})
    assert set(next_round(twice, 3, math.inf)) == {"packed", AUTO, "bucketed", "equal_width", AUTO_PADDED}
    assert next_round(case_of({name: ms * 3 for name, ms in times.items()}), 3, math.inf) == []


def test_time_ends_the_repeats_but_not_a_doubtful_verdict():
    """Guards against minutes of repeats of long calls, and against `auto` called slow for one disturbed call."""
    good = {"packed": [100.0], AUTO: [104.0], "bucketed": [100.0], AUTO_PADDED: [100.0]}
    assert next_round(case_of(good), 3, 100.0) == []
    assert set(next_round(case_of({**good, AUTO: [106.0]}), 3, 100.0)) == {AUTO, "packed"}
    assert set(next_round(case_of({**good, AUTO_PADDED: [120.0]}), 3, -1.0)) == {AUTO_PADDED, "bucketed"}
    disturbed = {**good, "packed": [100.0] * 3, AUTO: [500.0] * 2}
    assert AUTO in next_round(case_of(disturbed), 3, math.inf)
    assert next_round(case_of({**disturbed, AUTO: [500.0] * 3}), 3, 0.0) == []


def test_what_a_call_is_expected_to_take():
    """Guards against an extension from one budget alone, and a line through others than the last two."""
    earlier = [case_of({"packed": [times]}, budget) for budget, times in ((1, 999.0), (2, 50.0), (16, 190.0))]
    assert expected_ms(unrun(128, predicted=7.0), earlier[:1], "packed") == 7.0
    assert expected_ms(unrun(128), earlier, "packed") == pytest.approx(190.0 + 10.0 * 112)


def test_long_calls_that_tell_nothing_are_left_out():
    """Guards against minutes for routes that are known to be slower, and against leaving out one that may be best."""
    lines = {"packed": (50, 190), "bucketed": (55, 195), "equal_width": (55, 195), "per_prompt": (300, 440)}
    lines |= {"ordinary": (60, 340), AUTO: (50, 190), AUTO_PADDED: (55, 195)}
    earlier = [case_of({name: [line[place]] for name, line in lines.items()}, (2, 16)[place]) for place in (0, 1)]
    case = unrun(128)
    leave_out(case, earlier)
    left = {name: result.extended_ms for name, result in case.results.items() if result.extended_ms is not None}
    assert left == {"per_prompt": pytest.approx(1560.0), "ordinary": pytest.approx(2580.0)}
    assert [name for name, result in case.results.items() if result.borrowed] == ["equal_width", AUTO_PADDED]
    assert runs_in(case) == ["packed", "bucketed", AUTO]
    short = unrun(32)
    leave_out(short, earlier)
    assert runs_in(short) == list(CONTENDERS)
    first = unrun(128, predicted=2000.0)
    leave_out(first, [])
    assert runs_in(first) == ["packed", "bucketed", "per_prompt", "ordinary", AUTO]


def test_nobody_borrows_of_one_that_was_left_out():
    """Guards against `auto` without packed judged by an extension, where it chose a slow route."""
    lines = dict.fromkeys(CONTENDERS, (50, 190)) | {"bucketed": (90, 440), AUTO_PADDED: (90, 440)}
    earlier = [case_of({name: [line[place]] for name, line in lines.items()}, (2, 16)[place]) for place in (0, 1)]
    case = unrun(128)
    leave_out(case, earlier)
    assert case.results["bucketed"].extended_ms is not None
    assert AUTO_PADDED in runs_in(case)
    assert "equal_width" in runs_in(case)


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    write_costs(path, calibrate(MODEL, WorkloadRange(min_length=2, max_length=6, max_batch=2), repeats=1).file)
    return path


WORKLOADS = (Workload("even", (4, 4)), Workload("odd", (6, 1, 1)))


def test_a_sweep_of_long_calls(costs, tmp_path, monkeypatch):
    """Guards against a report that has no time for what was not called, or shows it as if it had been."""
    for module in (sweep_rounds, sweep_calls):
        monkeypatch.setattr(module, "LONG_MS", 0.0)
    kept = []
    cases = sweep(
        MODEL, WORKLOADS, (3, 2, 12), costs, repeats=2, case_seconds=0.0, reference=Reference(), keep=kept.append
    )
    assert [(case.workload, case.new_tokens) for case in cases] == [
        (name, budget) for name in ("even", "odd") for budget in (2, 3, 12)
    ]
    assert [case.new_tokens for case in kept] == [2, 2, 3, 3, 12, 12]
    for case in cases:
        assert tuple(case.results) == CONTENDERS
        assert case.results[AUTO].ms
        assert not case.results[AUTO].borrowed
        for result in case.results.values():
            assert (result.ms == []) == (result.extended_ms is not None)
            if result.borrowed:
                assert result.ms == case.results[result.same_as].ms
                assert result.agreement == 1.0
            assert result.prefill_tokens > 0
            assert result.decode_steps == case.new_tokens - 1
    (even, *_) = cases
    assert even.results["equal_width"].same_as == "bucketed"
    assert even.results["equal_width"].borrowed
    path = tmp_path / "sweep.json"
    whole = SweepResult({"dtype": "float32"}, {}, [], {}, cases)
    write_sweep(path, whole)
    assert read_sweep(path) == whole
    page = tmp_path / "page.html"
    write_report(whole, page)
    borrowed = next(result for result in even.results.values() if result.borrowed)
    assert f"*{borrowed.least_ms:.1f}" in page.read_text("utf-8")


def test_same_work_is_told(costs):
    """Guards against a ratio called a regression that is noise, and against unlike work called the same."""
    cases = {case.workload: case for case in sweep(MODEL, WORKLOADS, (2,), costs, repeats=1)}
    for case in cases.values():
        for contender in (AUTO, AUTO_PADDED):
            assert case.results[contender].same_as
        assert case.results["packed"].same_as == case.results["ordinary"].same_as == ""
        assert case.noise >= 0
    assert cases["odd"].results["per_prompt"].same_as == ""
    best = case_of({"packed": [10.0], AUTO: [12.0], "bucketed": [11.0], "equal_width": [9.0], AUTO_PADDED: [9.5]})
    assert best.best() == "equal_width"
    assert not best.is_same_work(AUTO)
    assert best.is_same_work(AUTO_PADDED)
    assert best.noise == pytest.approx(11.0 / 9.0 - 1)


def test_refills_are_work_of_their_own(costs):
    """Guards against plans of the first admission taken for those of the whole call."""
    (case,) = sweep(MODEL, WORKLOADS[1:], (2,), costs, config=RolloutConfig(max_slots=2), repeats=1)
    assert {result.same_as for result in case.results.values()} == {""}


def test_time_that_runs_out_leaves_cases_out(costs):
    """Guards against a sweep that is killed, and with it all that was found."""
    assert sweep(MODEL, WORKLOADS, (2, 3), costs, repeats=1, seconds=0.0) == []
    assert len(sweep(MODEL, WORKLOADS, (2, 3), costs, repeats=1, seconds=600.0)) == 4


def test_the_time_of_all_ends_repeats(costs, monkeypatch):
    """Guards against a sweep of a second that repeats its first case for five."""
    given = []
    monkeypatch.setattr(sweep_module, "_run", lambda case, track, repeats, seconds: given.append(seconds))
    sweep(MODEL, WORKLOADS[:1], (2,), costs, case_seconds=5.0, seconds=3.0)
    sweep(MODEL, WORKLOADS[:1], (2,), costs, case_seconds=5.0, seconds=600.0)
    assert 0 < given[0] < 3.0
    assert given[1] == 5.0


def test_a_call_that_captures_is_not_counted():
    """Guards against the seconds of a capture in the time of a route."""
    engine = RolloutEngine(MODEL, config=RolloutConfig(max_slots=2, max_length=16))
    calls = []
    generate = engine.generate
    engine.generate = lambda *arguments: calls.append(1) or generate(*arguments)
    track = Track(WORKLOADS[0], MODEL, [[1, 2], [3, 4]], {"packed": engine}, QuietHost(0.0), None, lambda what: None)
    case = dataclasses.replace(unrun(3), results={"packed": RouteResult(1.0)})
    for expected in (2, 3):
        track.call(case, "packed")
        assert len(calls) == expected
    assert len(case.results["packed"].ms) == 2
