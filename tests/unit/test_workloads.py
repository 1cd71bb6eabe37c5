"""Workloads of a sweep: those built in, and files of them."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from liveroll import PromptError
from liveroll.tools.workloads import Workload, draw_prompts, read_workloads


def test_those_built_in():
    """Guards against other lengths than the ones that published figures are of."""
    lengths = {workload.name: Counter(workload.lengths) for workload in read_workloads("seed")}
    assert lengths == {
        "short": Counter(dict.fromkeys(range(13, 21), 4)),
        "long tail": {512: 1, 16: 31},
        "short tail": {20: 1, 1: 31},
        "moderate": {128: 1, 4: 31},
        "spread": Counter(range(16, 513, 16)),
        "many": {16: 128},
    }


def test_a_file(tmp_path):
    """Guards against lengths in another order, which is that of the prompts."""
    path = tmp_path / "w.jsonl"
    path.write_text('{"name": "a", "lengths": [3, 1, 2]}\n\n{"lengths": [7], "name": "é"}\n', "utf-8")
    assert read_workloads(str(path)) == (Workload("a", (3, 1, 2)), Workload("é", (7,)))


@pytest.mark.parametrize("lengths", [(1,) * 17, (2,) * 200, (20, *[1] * 16), tuple(range(1, 40)) * 3, (5,) * 32])
def test_prompts_are_not_alike(lengths):
    """Guards against equal prompts, which share one prefill, so that less is timed than was asked for."""
    prompts = draw_prompts(lengths, 17, seed=3)
    assert [len(prompt) for prompt in prompts] == list(lengths)
    assert all(0 <= token < 17 for prompt in prompts for token in prompt)
    assert len(set(map(tuple, prompts))) == len(prompts)
    assert draw_prompts(lengths, 17, seed=3) == prompts
    assert len(draw_prompts((1,) * 20, 17, seed=3)) == 20


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "must be an object with name and lengths"),
        ({"name": "a"}, "must be an object with name and lengths"),
        ({"name": "a", "lengths": [1], "seed": 3}, "must be an object with name and lengths"),
        ({"name": "", "lengths": [1]}, "name must be a string that is not empty, not ''"),
        ({"name": 3, "lengths": [1]}, "name must be a string that is not empty, not 3"),
        ({"name": "a\ud800", "lengths": [1]}, "name must be of letters that can be printed"),
        ({"name": "a", "lengths": []}, "lengths must be a list of at least one number"),
        ({"name": "a", "lengths": 16}, "lengths must be a list of at least one number, not 16"),
        ({"name": "a", "lengths": [16, 0]}, "lengths holds 0"),
        ({"name": "a", "lengths": [1.5]}, r"lengths holds 1\.5"),
        ({"name": "a", "lengths": [True]}, "lengths holds True"),
        ({"name": "good", "lengths": [1]}, "there is a workload 'good' already"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line, message, tmp_path):
    """Guards against a sweep that runs for minutes before it comes to the line."""
    path = tmp_path / "w.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_text('{"name": "good", "lengths": [4]}\n\n' + text, "utf-8")
    with pytest.raises(PromptError, match=rf"^line 3 of .*w\.jsonl: {message}"):
        read_workloads(str(path))


def test_a_file_of_nothing_and_no_file(tmp_path):
    """Guards against a sweep of nothing, and a traceback for a name misspelt."""
    path = tmp_path / "w.jsonl"
    path.write_text("\n")
    with pytest.raises(PromptError, match="has no workloads"):
        read_workloads(str(path))
    with pytest.raises(PromptError, match="cannot read the workloads file sede: "):
        read_workloads("sede")
