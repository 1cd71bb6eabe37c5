"""Reading a prompts file: every bad line is found, by number, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from liveroll import ConfigError, PromptError, SamplingConfig
from liveroll.tools.jobs import JobFile, read_jobs, refuse_bad_lines

BASE = SamplingConfig(max_new_tokens=8, seed=100)


def read(tmp_path: Path, *lines: Any) -> JobFile:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
    return read_jobs(path, BASE)


def only_reason(file: JobFile) -> str:
    assert not file.jobs
    assert len(file.bad) == 1
    return file.bad[0].reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a"', "not JSON: "),
        ('["a"]', "must be a JSON object, not a list"),
        ('{"prompt": NaN}', "prompt must be a string, not a number"),
        ({}, "needs exactly one of prompt, messages, prompt_ids; it has none"),
        ({"prompt": "a", "prompt_ids": [1]}, "it has prompt and prompt_ids"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": None}, "prompt must be a string, not null"),
        ({"prompt": ["a"]}, "prompt must be a string, not a list"),
        ({"promt": "a"}, "unknown key 'promt'"),
        ({"prompt_ids": []}, "at least one token id"),
        ({"prompt_ids": [1, -2]}, "holds -2"),
        ({"prompt_ids": [1, True]}, "holds True"),
        ({"prompt_ids": [1, 2.0]}, "holds 2.0"),
        ({"messages": []}, "at least one message"),
        ({"messages": "hello"}, "at least one message"),
        ({"messages": ["hello"]}, "messages[0] must be a JSON object, not a string"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}, "messages[1] needs 'content'"),
        ({"prompt": "a", "id": None}, "id must be a string or a whole number, not null"),
        ({"prompt": "a", "id": True}, "id must be a string or a whole number, not true or false"),
        ({"prompt": "a", "sampling": [1]}, "sampling must be a JSON object, not a list"),
        ({"prompt": "a", "sampling": {"temprature": 1}}, "unknown key 'temprature' in sampling"),
        (
            {"prompt": "a", "sampling": {"top_p": 2}},
            "SamplingConfig.top_p must be above 0 and at most 1, not 2",
        ),
        ({"prompt": "a", "sampling": {"min_new_tokens": 9}}, "min_new_tokens=9 is more than max_new_tokens=8"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_says_what_is_wrong(tmp_path: Path, line: Any, reason: str) -> None:
    """Guards against a line that is silently dropped, coerced, or run with a misspelt setting ignored."""
    assert reason in only_reason(read(tmp_path, line))


def test_all_bad_lines_are_named_by_their_number_in_the_file(tmp_path: Path) -> None:
    """Guards against stopping at the first bad line, and against numbers that leave out blank lines."""
    file = read(tmp_path, {"prompt": "a"}, "", "nonsense", {"prompt": "b"}, {"prompt": 1})
    assert [line.number for line in file.bad] == [3, 5]
    assert [job.index for job in file.jobs] == [0, 3]
    with pytest.raises(PromptError, match=r"(?s)2 bad lines in .*; correct the file:\n  line 3: .*\n  line 5: "):
        refuse_bad_lines(file.path, file.bad)


def test_a_line_that_is_not_utf8_is_a_bad_line(tmp_path: Path) -> None:
    """Guards against one stray byte making the whole file unreadable."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n{"prompt": "c"}\n')
    file = read_jobs(path, BASE)
    assert [job.prompt for job in file.jobs] == ["a", "c"]
    assert file.bad[0].number == 2
    assert "not UTF-8" in file.bad[0].reason


def test_duplicate_ids_are_bad_lines(tmp_path: Path) -> None:
    """Guards against two rows that cannot be told apart in the output, the default ids among them."""
    file = read(tmp_path, {"prompt": "a", "id": 2}, {"prompt": "b"}, {"prompt": "c", "id": "2"})
    assert [job.id for job in file.jobs] == [2, "2"]
    assert [(line.number, line.reason) for line in file.bad] == [(2, "id 2 is already that of line 1")]


def test_newlines_and_marks_of_other_systems_are_read(tmp_path: Path) -> None:
    """Guards against a byte-order mark, CRLF ends or a U+2028 inside a string breaking a line in two."""
    path = tmp_path / "in.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\r\n'.encode())
    file = read_jobs(path, BASE)
    assert not file.bad
    assert [job.prompt for job in file.jobs] == ["a\u2028b", "c"]


def test_overrides_win_over_the_run_and_each_line_has_its_own_seed(tmp_path: Path) -> None:
    """Guards against equal prompts on two lines drawing the same samples, and against overrides that leak."""
    file = read(
        tmp_path,
        {"prompt": "a"},
        {"prompt": "a", "sampling": {"max_new_tokens": 3, "stop": ["x", "y"], "seed": None}},
        {"prompt": "a", "sampling": {"seed": 7, "temperature": 0}},
    )
    assert [job.sampling.seed for job in file.jobs] == [100, 101, 7]
    assert [job.sampling.max_new_tokens for job in file.jobs] == [8, 3, 8]
    assert [job.sampling.stop for job in file.jobs] == [(), ("x", "y"), ()]
    assert [job.sampling.temperature for job in file.jobs] == [None, None, 0]


def test_no_seed_and_no_file_are_refused(tmp_path: Path) -> None:
    """Guards against a traceback for a mistyped path, and against lines that cannot be drawn again."""
    with pytest.raises(PromptError, match=r"cannot read the prompts file .*missing\.jsonl: No such file"):
        read_jobs(tmp_path / "missing.jsonl", BASE)
    with pytest.raises(ConfigError, match=r"SamplingConfig\.seed must be given"):
        read_jobs(tmp_path / "in.jsonl", SamplingConfig())


def test_equal_prompts_with_equal_seeds_are_a_bad_line(tmp_path: Path) -> None:
    """Guards against a resumed run drawing for the second line what the first had drawn already."""
    same = {"prompt": "a", "sampling": {"seed": 7}}
    file = read(tmp_path, same, {"prompt": "b", "sampling": {"seed": 7}}, same)
    assert [job.index for job in file.jobs] == [0, 1]
    assert [line.number for line in file.bad] == [3]
    assert "has the prompt and the seed of line 1" in file.bad[0].reason
