"""`liveroll calibrate`, `sweep` and `report`, each from end to end on the model that ships with the package."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from liveroll.cli import app
from liveroll.planning.costs_file import read_costs
from liveroll.tools import calibrate_run
from liveroll.tools.calibrate_run import journal_path
from liveroll.tools.grid import WorkloadRange, plan_grid
from liveroll.tools.journal import Journal, meta_path
from liveroll.tools.measure import Stopwatch, sample_id
from liveroll.tools.sweep_calls import Track
from liveroll.tools.sweep_file import read_sweep
from liveroll.tools.sweep_result import AUTO, CONTENDERS

RANGE = ("--min-length", "2", "--max-length", "6", "--max-batch", "2")
WORKLOADS = '{"name": "<odd> & even", "lengths": [1, 6, 1]}\n{"name": "even", "lengths": [4, 4]}\n'


def run(*arguments, expect=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == expect, result.output
    return result.output


def calibrate(out, *arguments, expect=0):
    return run("calibrate", "--model", "tiny", "--out", out, *RANGE, "--repeats", "1", *arguments, expect=expect)


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    calibrate(path)
    return path


@pytest.fixture(scope="module")
def workloads(tmp_path_factory):
    path = tmp_path_factory.mktemp("workloads") / "w.jsonl"
    path.write_text(WORKLOADS)
    return path


def sweep(costs, workloads, out, *arguments, expect=0):
    common = ("--workloads", workloads, "--out", out, "--repeats", "1", "--new-tokens", "3,2")
    return run("sweep", "--model", "tiny", "--costs", costs, *common, *arguments, expect=expect)


def test_calibrate_writes_costs_and_nothing_else(costs):
    """Guards against a journal left behind, from which the next run would copy old times."""
    file = read_costs(costs)
    assert file.origin.model_type == "llama"
    assert [path.name for path in costs.parent.iterdir()] == [costs.name]


def test_calibrate_shows_the_error_of_each_point(tmp_path):
    """Guards against coefficients whose fit nobody can judge."""
    shown = calibrate(tmp_path / "costs.json")
    points = read_costs(tmp_path / "costs.json").points
    assert shown.count("%") >= len(points)
    for name in ("decode step", "padded", "packed", "ordinary", "fixed_ms", "ordinary_kv_ms_per_mib"):
        assert name in shown


def test_an_interrupted_calibration_goes_on(tmp_path, monkeypatch):
    """Guards against samples lost at Ctrl-C, taken again or mixed with others', and a traceback for an edited one."""
    out = tmp_path / "costs.json"
    timed = []
    time = Stopwatch.time

    def interrupted(self, cell, repeat=0):
        if len(timed) == 20:
            raise KeyboardInterrupt
        timed.append(cell)
        return time(self, cell, repeat)

    monkeypatch.setattr(Stopwatch, "time", interrupted)
    assert "interrupted; the same command" in calibrate(out, expect=130)
    journal = journal_path(out)
    kept = journal.read_text().splitlines()
    assert 0 < len(kept) < 20
    assert not out.exists()
    monkeypatch.undo()

    shown = calibrate(out, "--no-capture", expect=2)
    assert "was made with other settings" in shown
    assert "measured.capture: true then, false now" in shown
    assert journal.read_text().splitlines() == kept

    journal.write_text("\n".join(line.replace("wall_ms", "wall") for line in kept) + "\n")
    assert f"line 1 of {journal} holds no times" in calibrate(out, expect=2)
    journal.write_text("\n".join(kept) + "\n")

    added = []
    write = Journal.write

    def noted(self, row):
        added.append(row["id"])
        write(self, row)

    monkeypatch.setattr(Journal, "write", noted)
    calibrate(out)
    before = [json.loads(line)["id"] for line in kept]
    assert len(set(before) | set(added)) == len(before) + len(added)
    cells = plan_grid(WorkloadRange(min_length=2, max_length=6, max_batch=2), None)
    assert {*before, *added} == {sample_id(cell, 0) for cell in cells}
    assert read_costs(out).points
    assert not journal.exists()
    assert not meta_path(journal).exists()


def fill(journal):
    os.dup2(os.open("/dev/full", os.O_WRONLY), journal._file.fileno())
    return journal


def cannot_write(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("owner", "name", "full"), [(Journal, "__enter__", fill), (calibrate_run, "write_costs", cannot_write)]
)
def test_a_calibration_on_a_full_disk(owner, name, full, tmp_path, monkeypatch):
    """Guards against a traceback where samples, or the costs, cannot be written after all."""
    monkeypatch.setattr(owner, name, full)
    assert "No space left" in calibrate(tmp_path / "costs.json", expect=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--repeats", "0"), "CalibrateOptions.repeats must be at least 1, not 0"),
        (("--repeats", "3000000"), "CalibrateOptions.repeats must be at most 1000, not 3000000"),
        (("--max-batch", "0"), "WorkloadRange.max_batch must be at least 1, not 0"),
        (("--max-batch", "1" + "0" * 400), "WorkloadRange.max_batch must be at most"),
        (("--min-length", "9"), "the shortest prompt, 9 tokens, is longer than the longest, 6"),
        (("--max-length", "2000"), "lower max_length"),
        (("--max-batch", "1000000000"), "lower max_batch or max_length"),
        (("--model", "no/such/folder"), "cannot load the model 'no/such/folder'"),
        (("--out", "no/such/folder/costs.json"), "there is no folder"),
        (("--out", "."), "cannot write to .: it is not a file"),
    ],
)
def test_a_wrong_option_of_calibrate(arguments, message, tmp_path):
    """Guards against tracebacks for a user's slip, and against finding it after minutes."""
    shown = calibrate(tmp_path / "costs.json", *arguments, expect=2)
    assert message in shown
    assert "Traceback" not in shown


def test_a_calibration_that_took_no_sample_leaves_nothing(tmp_path):
    """Guards against an empty file of samples beside costs that were refused."""
    assert "meta device" in calibrate(tmp_path / "costs.json", "--device", "meta", expect=2)
    assert not list(tmp_path.iterdir())


def test_names_are_shown_as_they_are(costs, tmp_path):
    """Guards against names taken for markup or formulas, which end a sweep, and long ones that hide its times."""
    names = ["[/]", "$\\frac$", "[red]x[/red]", "\N{CJK UNIFIED IDEOGRAPH-4E2D}", "long " * 40]
    workloads, out = tmp_path / "w.jsonl", tmp_path / "sweep.json"
    workloads.write_text("\n".join(json.dumps({"name": name, "lengths": [2]}) for name in names))
    shown = sweep(costs, workloads, out, "--new-tokens", "2", "--check", "0")
    assert all(name in shown for name in names[:-1])
    assert "packed  bucketed  equal width" in shown
    assert "long long" in shown
    run("report", out, "--out", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert all(name in text for name in names)


def test_sweep_and_report(costs, workloads, tmp_path):
    """Guards against a route left out, tokens unchecked, a page that needs other files, and names taken for markup."""
    out, page = tmp_path / "sweep.json", tmp_path / "page.html"
    shown = sweep(costs, workloads, out)
    assert "within 5% of the best route in" in shown
    found = read_sweep(out)
    assert [(case.workload, case.new_tokens) for case in found.cases] == [
        ("<odd> & even", 2),
        ("<odd> & even", 3),
        ("even", 2),
        ("even", 3),
    ]
    assert found.agrees
    for case in found.cases:
        assert tuple(case.results) == CONTENDERS
        for name, result in case.results.items():
            assert len(result.ms) == 1
            assert result.agreement == 1.0
            assert result.peak_bytes is None
            assert name in (result.taken, AUTO, "auto without packed")
            assert result.decode_steps == case.new_tokens - 1
        assert case.results["auto without packed"].taken != "packed"
        assert case.results["per_prompt"].prefill_forwards == len(case.lengths)
        assert sorted(length for bucket in case.buckets for length in bucket.lengths) == sorted(case.lengths)
        assert case.results["packed"].padded_tokens == 0
    assert found.cases[0].results["equal_width"].padded_tokens == 10
    assert found.origin == json.loads(costs.read_text())["metadata"]

    written = run("report", out, "--out", page).split()
    assert written == [
        str(page),
        *(str(tmp_path / f"page-{name}.png") for name in ("times-2", "times-3", "costs", "buckets")),
    ]
    text = page.read_text("utf-8")
    assert text.count("<img ") == text.count('src="data:image/png;base64,') == len(written) - 1
    assert "http" not in text
    assert "<odd>" not in text
    assert "&lt;odd&gt; &amp; even" in text
    for path in map(Path, written[1:]):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_tokens_that_differ_fail_a_sweep(costs, workloads, tmp_path, monkeypatch):
    """Guards against a sweep that compares the speed of wrong answers."""
    monkeypatch.setattr("liveroll.tools.reference.Reference.agreement", lambda *_: 0.5)
    shown = sweep(costs, workloads, tmp_path / "sweep.json", expect=1)
    assert "50.00% at worst" in shown
    assert "tokens differ" in shown


@pytest.mark.parametrize("done", [0, 1, 3])
def test_an_interrupted_sweep_keeps_what_is_done(done, costs, workloads, tmp_path, monkeypatch):
    """Guards against cases of hours that are lost at Ctrl-C, and a file that hides that some are not in it."""
    opened = []
    open_case = Track.open

    def interrupted(self, budget):
        if len(opened) == done:
            raise KeyboardInterrupt
        opened.append(budget)
        return open_case(self, budget)

    monkeypatch.setattr(Track, "open", interrupted)
    out = tmp_path / "sweep.json"
    shown = sweep(costs, workloads, out, "--check", "0", expect=130)
    if not done:
        assert "interrupted; nothing was written" in shown
        assert not out.exists()
        return
    assert f"{4 - done} cases were left out by the interruption" in shown
    names = [("<odd> & even", 2), ("<odd> & even", 3), ("even", 2)]
    assert [(case.workload, case.new_tokens) for case in read_sweep(out).cases] == names[:done]
    assert run("report", out, "--out", tmp_path / "page.html")


def test_nothing_is_checked_where_nothing_is_to_be(costs, workloads, tmp_path):
    """Guards against the slow check of a sweep that was told to leave it out."""
    shown = sweep(costs, workloads, tmp_path / "sweep.json", "--check", "0", "--new-tokens", "2")
    assert "tokens equal" not in shown
    assert read_sweep(tmp_path / "sweep.json").cases[0].results[AUTO].agreement is None


def test_costs_of_something_else_are_refused(costs, workloads, tmp_path):
    """Guards against routes judged by the costs of another model or device."""
    content = json.loads(costs.read_text())
    content["metadata"] |= {"device": "an abacus", "sources": "0"}
    other = tmp_path / "costs.json"
    other.write_text(json.dumps(content))
    shown = sweep(other, workloads, tmp_path / "sweep.json", expect=2)
    assert "device" in shown
    assert "an abacus" in shown
    assert "sources" in shown
    assert not (tmp_path / "sweep.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--new-tokens", "2,x"), "whole numbers separated by commas, such as 2,16, not '2,x'"),
        (("--new-tokens", "0,2"), "--new-tokens holds 0"),
        (("--new-tokens", "1020"), "workload '<odd> & even' has a prompt of 6 tokens"),
        (("--repeats", "0"), "SweepOptions.repeats must be at least 1, not 0"),
        (("--slots", "0"), "SweepOptions.slots must be at least 1, not 0"),
        (("--workloads", "no.jsonl"), "cannot read the workloads file no.jsonl"),
        (("--costs", "no.json"), "cannot read the costs file no.json"),
        (("--out", "no/such/folder/sweep.json"), "there is no folder no/such/folder"),
        (("--out", "."), "cannot write to .: it is not a file"),
    ],
)
def test_a_wrong_option_of_sweep(arguments, message, costs, workloads, tmp_path):
    """Guards against tracebacks for a user's slip, and against finding it after minutes."""
    shown = sweep(costs, workloads, tmp_path / "sweep.json", *arguments, expect=2)
    assert message in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"cases": []}', '{"cases": [{"workload": 1}]}'])
def test_a_file_that_is_no_sweep(content, tmp_path):
    """Guards against a traceback, or an empty page, for the wrong file."""
    path = tmp_path / "sweep.json"
    path.write_text(content)
    assert "error: " in run("report", path, "--out", tmp_path / "page.html", expect=2)
    assert not (tmp_path / "page.html").exists()
    assert "cannot read the sweep" in run("report", tmp_path / "none.json", expect=2)


def test_a_sweep_never_replaces_what_it_reads(costs, workloads, tmp_path):
    """Guards against costs, or workloads, that are gone once they were used."""
    for read in (costs, workloads):
        before = read.read_bytes()
        assert f"it would replace {read}" in sweep(costs, workloads, read, "--new-tokens", "2", expect=2)
        assert read.read_bytes() == before


def test_a_page_that_cannot_be_written(costs, workloads, tmp_path):
    """Guards against a traceback for a folder misspelt, and against a sweep lost under its own page."""
    sweep(costs, workloads, tmp_path / "sweep.json", "--new-tokens", "2", "--check", "0")
    before = (tmp_path / "sweep.json").read_text()
    for out, message in (
        (tmp_path / "none" / "page.html", "there is no folder"),
        (tmp_path, "it is not a file"),
        ("/dev/null", "it is not a file"),
        (tmp_path / "sweep.json", "it would replace"),
    ):
        assert message in run("report", tmp_path / "sweep.json", "--out", out, expect=2)
    assert (tmp_path / "sweep.json").read_text() == before
