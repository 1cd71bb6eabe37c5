"""What a sweep concludes from its times, what it checks against, and the engines it runs."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path

import pytest
import zoo
from snapshots import left_as_found

from liveroll import ConfigError, RolloutConfig, RolloutEngine, SamplingConfig
from liveroll.tools.beside import beside
from liveroll.tools.reference import Reference
from liveroll.tools.sweep import changes_for, sweep
from liveroll.tools.sweep_charts import describe_lengths, draw_buckets, draw_costs, draw_times
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
from liveroll.tools.workloads import Workload

MODEL = zoo.build("llama")
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=5)
BUDGET = 6
GREEDY = SamplingConfig(max_new_tokens=BUDGET, stop_token_ids=())
TIMES = {
    "packed": [11.0, 11.5, 12.0],
    "bucketed": [12.0, 12.5, 12.0],
    "equal_width": [20.0] * 3,
    "per_prompt": [50.0] * 3,
    "ordinary": [13.0] * 3,
    AUTO: [13.2, 14.0, 90.0],
    AUTO_PADDED: [12.6, 12.6, 90.0],
}
TAKEN = {**{name: name for name in CONTENDERS}, AUTO: "bucketed", AUTO_PADDED: "ordinary"}


def case_of(times=TIMES, agreement=1.0):
    results = {
        name: RouteResult(10.0, TAKEN[name], list(times[name]), None, 1, 40, 4, 1, agreement) for name in CONTENDERS
    }
    buckets = (BucketShape(16, (16, 14)), BucketShape(5, (5,)))
    return Case("w", (16, 14, 5), 2, buckets, results)


def sweep_of(*cases):
    points = [
        {"kind": kind, "route": route, "rows": 1, "width": 2, "steps": 0, "ms": 3.0, "predicted_ms": 2.9}
        for kind in ("prefill", "decode")
        for route in ("packed", "equal_width", "ordinary")
    ]
    return SweepResult({"dtype": "float32"}, {"fixed_ms": 1.0}, points, {"repeats": 3}, list(cases))


def test_ratios():
    """Guards against a best route that may not be taken, a mean that one slow run ruins, and noise called a choice."""
    case = case_of()
    assert case.best() == "packed"
    assert case.best(AUTO_PADDED) == "bucketed"
    assert case.ratio() == pytest.approx(13.2 / 11.0)
    assert case.ratio(AUTO_PADDED) == pytest.approx(12.6 / 12.0)
    assert case.choice_ratio() == pytest.approx(12.0 / 11.0)
    assert case.choice_ratio(AUTO_PADDED) == pytest.approx(13.0 / 12.0)
    assert case.tokens_per_second("packed") == pytest.approx(3 * 2 / 11.0 * 1e3)


def test_noise_is_of_calls():
    """Guards against an extension from smaller budgets, which nothing was timed for, that is counted as noise."""
    case = case_of()
    case.results["equal_width"].same_as = "bucketed"
    assert case.noise == pytest.approx(20.0 / 12.0 - 1)
    case.results["equal_width"].extended_ms = 30.0
    assert case.noise == pytest.approx(12.0 / 11.0 - 1)


def test_the_summary_is_of_the_worst():
    """Guards against a regression hidden behind a mean."""
    good = case_of({**TIMES, AUTO: [11.0] * 3}, agreement=0.75)
    summary = sweep_of(good, case_of()).summary()
    assert summary["agreement"] == 0.75
    assert summary[AUTO]["worst ratio"] == 1.2
    assert summary[AUTO]["worst regression"] == "20.00%"
    assert (summary[AUTO]["within 5%"], summary[AUTO]["cases"]) == (1, 2)
    assert summary[AUTO]["routes taken"] == ["bucketed"]
    assert sweep_of(good).summary()[AUTO]["worst regression"] == "0.00%"
    assert not sweep_of(good, case_of()).agrees
    assert sweep_of(case_of(agreement=None)).agrees


def test_a_file_gives_a_sweep_back(tmp_path):
    """Guards against a report of other times than those measured."""
    path = tmp_path / "sweep.json"
    whole = sweep_of(case_of(), case_of(agreement=None))
    write_sweep(path, whole)
    assert read_sweep(path) == whole


def test_a_file_that_lacks_a_route(tmp_path):
    """Guards against a comparison with a route missing."""
    path = tmp_path / "sweep.json"
    lame = case_of()
    del lame.results["packed"]
    whole = sweep_of(case_of())
    write_sweep(path, whole)
    path.write_text(path.read_text().replace('"packed": {', '"pakced": {'))
    with pytest.raises(ConfigError, match="is no sweep that `liveroll sweep` wrote: it lacks 'packed'"):
        read_sweep(path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content.update(origin=3), "origin is no object"),
        (lambda content: content.update(points=[{}]), "missing"),
        (lambda content: content["points"][0].update(ms=-1.0), "a point has no times"),
        (lambda content: content["points"][0].update(ms=10**400), "a point has no times"),
        (lambda content: content["cases"][0].update(buckets=[]), "workload 'w' has no buckets"),
        (lambda content: content["cases"][0].update(lengths=[]), "workload 'w' has no lengths or no budget"),
        (lambda content: packed(content).update(ms=[]), "packed of workload 'w' has no times"),
        (lambda content: packed(content).update(ms=["x"]), "packed of workload 'w' has no times"),
        (lambda content: packed(content).update(ms=[float("nan")]), "packed of workload 'w' has no times"),
        (lambda content: packed(content).update(ms=[0.0]), "packed of workload 'w' has no times"),
        (lambda content: packed(content).update(predicted_ms=None), "packed of workload 'w' has an estimate"),
        (lambda content: packed(content).update(taken="bus"), "packed of workload 'w' took 'bus'"),
        (lambda content: packed(content).update(same_as="bus"), "packed of workload 'w' does the work of 'bus'"),
        (lambda content: packed(content).update(agreement="x"), "packed of workload 'w' has an agreement"),
        (lambda content: packed(content).update(agreement=1.5), "packed of workload 'w' has an agreement"),
        (lambda content: packed(content).update(agreement=10**400), "packed of workload 'w' has an agreement"),
        (lambda content: packed(content).update(peak_bytes="1"), "packed of workload 'w' has peak_bytes"),
        (lambda content: packed(content).update(peak_bytes=10**400), "packed of workload 'w' has peak_bytes"),
        (lambda content: packed(content).update(padded_tokens="1"), "a number of padded_tokens that is none"),
    ],
)
def test_a_file_that_was_edited(edit, message, tmp_path):
    """Guards against a traceback from the charts, or a page of times that none took."""
    path = tmp_path / "sweep.json"
    write_sweep(path, sweep_of(case_of()))
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"is no sweep that `liveroll sweep` wrote: .*{message}"):
        read_sweep(path)


def test_a_model_whose_size_is_no_number(tmp_path):
    """Guards against a traceback where a sweep is said to be of so many parameters."""
    odd = sweep_of(case_of())
    odd.origin.update(model_type="llama", parameters="many", device="cpu")
    page, *_ = write_report(odd, tmp_path / "page.html")
    assert "The model is not named." in page.read_text("utf-8")


def test_a_name_that_no_encoding_has(tmp_path):
    """Guards against a page that is emptied before it turns out that it cannot be written."""
    odd = sweep_of(case_of())
    odd.origin.update(device="\ud800")
    page, *_ = write_report(odd, tmp_path / "page.html")
    assert r"\ud800" in page.read_text("utf-8")


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    """Guards against a traceback where what was found cannot be written after all."""
    found = sweep_of(case_of())

    def full(self, content, *encoding):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match=r"cannot write to .*page-times-2\.png: No space left"):
        write_report(found, tmp_path / "page.html")
    monkeypatch.setattr(Path, "write_text", full)
    for write in (lambda path: write_sweep(path, found), lambda path: write_report(found, path)):
        with pytest.raises(ConfigError, match=r"cannot write to .*out: No space left"):
            write(tmp_path / "out")


def packed(content):
    return content["cases"][0]["routes"]["packed"]


def test_charts_of_odd_sweeps():
    """Guards against a chart that needs six workloads, few buckets, or points of every kind."""
    lone = dataclasses.replace(case_of(), buckets=tuple(BucketShape(width, (width,)) for width in range(1, 20)))
    for figure in (draw_times([lone]), draw_buckets([lone] * 4), draw_costs(sweep_of(lone))):
        figure.draw_without_rendering()
    empty = dataclasses.replace(sweep_of(lone), points=[])
    draw_costs(empty).draw_without_rendering()


def test_lengths_in_words():
    """Guards against a title of a hundred numbers."""
    assert describe_lengths((512, *[16] * 31)) == "1\N{MULTIPLICATION SIGN}512 + 31\N{MULTIPLICATION SIGN}16"
    assert describe_lengths(tuple(range(16, 513, 16))) == "32 of 16 to 512"


def test_the_reference_is_each_prompt_alone():
    """Guards against checking routes against one of themselves, or against responses that stop early."""
    with zoo.with_eos(MODEL, zoo.reference(MODEL, PROMPTS[2], max_new_tokens=BUDGET)[1]), left_as_found(MODEL):
        responses = Reference().of(MODEL, PROMPTS, BUDGET)
    assert responses == {
        place: zoo.reference(MODEL, prompt, max_new_tokens=BUDGET) for place, prompt in enumerate(PROMPTS)
    }


@pytest.mark.parametrize(
    ("count", "chosen"), [(None, [4, 0, 2, 1, 3]), (9, [4, 0, 2, 1, 3]), (3, [4, 2, 3]), (2, [4, 3]), (1, [3]), (0, [])]
)
def test_prompts_checked_are_spread_over_lengths(count, chosen):
    """Guards against checking short prompts alone, which are padded most."""
    prompts = [[0] * length for length in (5, 20, 9, 30, 1)]
    assert Reference(count)._chosen(prompts) == chosen


def test_agreement_counts_tokens():
    """Guards against a check that a wrong token passes, or that wants more tokens than were generated."""
    batch = RolloutEngine(MODEL).generate(PROMPTS, GREEDY)
    right = {place: list(completion.token_ids) for place, completion in enumerate(batch.completions)}
    assert Reference().agreement(right, batch) == 1.0
    longer = {place: [*tokens, 1, 2] for place, tokens in right.items()}
    assert Reference().agreement(longer, batch) == 1.0
    wrong = {1: [right[1][0] + 1, *right[1][1:]]}
    assert Reference().agreement(wrong, batch) == 1 - 1 / BUDGET
    assert len(next(iter(Reference(tokens=2).of(MODEL, PROMPTS[:1], BUDGET).values()))) == 2


def test_engines_beside_one_another():
    """Guards against a second set of pages or captured steps for each route, and against routes mixed up."""
    engine = RolloutEngine(MODEL, config=RolloutConfig(max_slots=8, max_length=64))
    first = engine.generate(PROMPTS, GREEDY)
    captured, held = engine.captures, engine.memory()
    for route in ("bucketed", "per_prompt", "equal_width", "packed", "ordinary"):
        other = beside(engine, prefill_route=route)
        batch = other.generate(PROMPTS, GREEDY)
        assert batch.stats.route == route
        assert [c.token_ids for c in batch.completions] == [c.token_ids for c in first.completions]
        assert (other.captures, other.memory()) == (captured, held)
    assert engine.generate(PROMPTS, GREEDY).stats.route == "packed"
    other.shutdown()
    assert engine.memory().total == 0


def test_what_contenders_may_take():
    """Guards against a contender that runs the route of another."""
    configs = {name: RolloutConfig(**{"prefill_route": "auto", **changes_for(name)}) for name in CONTENDERS}
    assert [config.prefill_route for config in configs.values()] == [*CONTENDERS[:5], "auto", "auto"]
    assert set(configs[AUTO].auto_routes) == set(CONTENDERS[:5])
    assert set(configs[AUTO_PADDED].auto_routes) == set(CONTENDERS[:5]) - {"packed"}


def test_a_sweep_of_nothing(tmp_path):
    """Guards against a sweep that ends at once, having compared nothing."""
    for workloads, budgets, repeats in (
        ((), (2,), 1),
        ((Workload("w", (1,)),), (), 1),
        ((Workload("w", (1,)),), (0,), 1),
    ):
        with pytest.raises(ConfigError, match="a sweep needs a workload"):
            sweep(MODEL, workloads, budgets, tmp_path / "none", repeats=repeats)
