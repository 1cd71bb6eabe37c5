"""The output file: whole rows survive anything, and rows of another run are never mixed in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from liveroll import ConfigError
from liveroll.tools.journal import Journal, find_resumption, meta_path

RUN = {"model": "m", "sampling": {"temperature": 1.0, "n": 2}}
IDS: dict[int, str | int] = {0: "a", 1: "b", 2: 3}


def row(index: int) -> dict[str, Any]:
    return {"index": index, "id": IDS[index], "completions": []}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Write an output file with two rows of three, and the third torn."""
    path = tmp_path / "out.jsonl"
    with Journal(path, RUN, find_resumption(path, RUN, IDS)) as journal:
        journal.write(row(2))
        journal.write(row(0))
    with path.open("ab") as file:
        file.write(b'{"index":1,"id":"b","comple')
    return path


def indexes(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_text("utf-8").splitlines()]


def test_a_torn_row_is_cut_and_whole_rows_stay(out: Path) -> None:
    """Guards against the row after a torn one being glued to it, which loses both."""
    resumption = find_resumption(out, RUN, IDS)
    assert resumption.done == {0, 2}
    with Journal(out, RUN, resumption) as journal:
        journal.write(row(1))
    assert indexes(out) == [2, 0, 1]


def test_a_row_without_its_newline_is_torn_even_if_it_reads_as_json(out: Path) -> None:
    """Guards against counting a row as done and then writing the next one onto the same line."""
    out.write_bytes(out.read_bytes().rsplit(b"\n", 1)[0])
    resumption = find_resumption(out, RUN, IDS)
    assert resumption.done == {2}


def test_looking_changes_nothing(out: Path) -> None:
    """Guards against a refused run having already cut or emptied the file."""
    before = out.read_bytes()
    find_resumption(out, RUN, IDS)
    find_resumption(out, RUN, IDS, overwrite=True)
    with pytest.raises(ConfigError):
        find_resumption(out, {**RUN, "model": "other"}, IDS)
    assert out.read_bytes() == before


def test_other_settings_are_refused_and_each_difference_is_named(out: Path) -> None:
    """Guards against rows of two models or settings in one file, unnoticed."""
    other = {"model": "m2", "sampling": {"temperature": 0.5, "n": 2, "top_k": 5}}
    with pytest.raises(ConfigError) as caught:
        find_resumption(out, other, IDS)
    message = str(caught.value)
    assert "--overwrite" in message
    assert '  model: "m" then, "m2" now' in message
    assert "  sampling.temperature: 1.0 then, 0.5 now" in message
    assert "  sampling.top_k: not given then, 5 now" in message
    assert "sampling.n" not in message


def test_overwrite_starts_again(out: Path) -> None:
    """Guards against old rows surviving under new settings."""
    other = {"model": "m2"}
    with Journal(out, other, find_resumption(out, other, IDS, overwrite=True)) as journal:
        journal.write(row(1))
    assert indexes(out) == [1]
    assert find_resumption(out, other, IDS).done == {1}


def test_a_file_that_no_run_made_is_not_touched(out: Path) -> None:
    """Guards against appending to, or cutting, some file that was named by mistake."""
    meta_path(out).unlink()
    with pytest.raises(ConfigError, match=r"not empty and out\.jsonl\.meta\.json is missing"):
        find_resumption(out, RUN, IDS)
    meta_path(out).write_text("{", "utf-8")
    with pytest.raises(ConfigError, match="is damaged"):
        find_resumption(out, RUN, IDS)


@pytest.mark.parametrize("line", ["[]", "{}", "not json", '{"index":0,"id":"b"}', '{"index":9,"id":"z"}', ""])
def test_a_line_that_is_no_row_of_the_run_is_refused_by_number(out: Path, line: str) -> None:
    """Guards against skipping a damaged line, whose prompt would then be missing or done twice."""
    out.write_text(out.read_text("utf-8").split("\n")[0] + "\n" + line + "\n", "utf-8")
    with pytest.raises(ConfigError, match=r"line 2 of .*out\.jsonl is no row of this run"):
        find_resumption(out, RUN, IDS)


def test_a_row_is_on_file_as_soon_as_it_is_written(out: Path) -> None:
    """Guards against rows held in a buffer, which a kill would lose."""
    with Journal(out, RUN, find_resumption(out, RUN, IDS)) as journal:
        journal.write(row(1))
        assert indexes(out) == [2, 0, 1]


def test_a_second_run_on_the_same_file_is_refused(out: Path) -> None:
    """Guards against a job started twice writing every row twice."""
    with Journal(out, RUN, find_resumption(out, RUN, IDS)) as journal:
        seen_meanwhile = find_resumption(out, RUN, IDS)
        with pytest.raises(ConfigError, match="another run is writing"):
            Journal(out, RUN, seen_meanwhile)
        journal.write(row(1))
    assert indexes(out) == [2, 0, 1]


def test_a_run_that_looked_before_another_wrote_is_refused(out: Path) -> None:
    """Guards against a run that loaded its model while another finished, and then does its rows again."""
    looked = find_resumption(out, RUN, IDS)
    with Journal(out, RUN, looked) as journal:
        journal.write(row(1))
    with pytest.raises(ConfigError, match="another run is writing"):
        Journal(out, RUN, looked)
    assert indexes(out) == [2, 0, 1]


def test_an_output_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """Guards against loading a model for minutes before finding out."""
    with pytest.raises(ConfigError, match="there is no folder"):
        find_resumption(tmp_path / "missing" / "out.jsonl", RUN, IDS)
    with pytest.raises(ConfigError, match="it is not a file"):
        find_resumption(tmp_path, RUN, IDS)


def test_a_disk_that_is_full(tmp_path):
    """Guards against a traceback of what writes or closes, in place of the name of the file."""
    out = tmp_path / "rows.jsonl"
    journal = Journal(out, RUN, find_resumption(out, RUN, IDS))
    os.dup2(os.open("/dev/full", os.O_WRONLY), journal._file.fileno())
    for act in (lambda: journal.write(row(0)), lambda: journal.__exit__(None, None, None)):
        with pytest.raises(ConfigError, match=r"cannot write to .*rows\.jsonl: No space left"):
            act()
