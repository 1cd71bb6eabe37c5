"""A short run of the demo, from the shipped model to the files it leaves."""

import json

import pytest

from liveroll import ConfigError
from liveroll.tools.demo import run_demo

ROUNDS = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "not" / "there yet"
    return out, run_demo(out, rounds=ROUNDS, seed=1)


def test_every_answer_is_written_down(run):
    """Guards against lost or mismatched lines: a reward that belongs to another answer cannot be checked later."""
    out, _ = run
    lines = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == ROUNDS * 32 * 8
    assert {line["round"] for line in lines} == set(range(ROUNDS))
    for line in lines:
        assert set(line) == {"round", "prompt", "response", "reward", "logprob", "finish_reason"}
        assert line["logprob"] < 0
        if line["reward"] == 1.0:
            total = sum(map(int, line["prompt"].rstrip("=").split("+")))
            assert int(line["response"].split(",")[-1]) == total
            assert line["finish_reason"] == "stop"


def test_the_curve_is_a_picture(run):
    """Guards against an empty or half-written file."""
    out, _ = run
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_run_was_on_policy_and_ended_with_a_plain_sentence(run):
    """Guards against an engine that rolls out stale weights after a training step."""
    _, result = run
    assert result.logprob_gap < 1e-3
    assert 0.2 < result.start_accuracy < 0.5
    assert f"from {result.start_accuracy:.1%} to {result.end_accuracy:.1%}" in result.sentence()


def test_the_same_seed_repeats_the_run(run, tmp_path):
    """Guards against randomness outside the seed, such as the global generator that `model.generate` draws from."""
    out, first = run
    again = run_demo(tmp_path, rounds=ROUNDS, seed=1)
    assert (tmp_path / "rollouts.jsonl").read_text() == (out / "rollouts.jsonl").read_text()
    assert again.end_accuracy == first.end_accuracy


def test_a_folder_that_is_none(tmp_path):
    """Guards against a traceback where the folder is a file's name."""
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="cannot write to the folder"):
        run_demo(tmp_path / "notes", rounds=1)
    assert (tmp_path / "notes").read_text() == "mine"
