"""`liveroll generate` from end to end, with a tiny model: whatever interrupts it, each line gets one row."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from batch_work import VOCABULARY, Work, save_checkpoint, tokens_of
from typer.testing import CliRunner

from liveroll.cli import app


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def work(tmp_path: Path, checkpoint: Path) -> Work:
    return Work(tmp_path, checkpoint)


def test_every_line_gets_one_row_with_all_its_samples(work: Work) -> None:
    """Guards against rows of the wrong prompt, samples out of order, and logprobs that were not asked for."""
    work.ask(
        {"prompt": "one and one"},
        {"prompt_ids": [3, 4, 5], "id": "ids"},
        {"messages": [{"role": "user", "content": "hello"}], "id": "chat"},
        {"prompt": "short", "sampling": {"n": 1, "max_new_tokens": 2, "temperature": 0, "logprobs": True}},
        {"prompt": "more", "sampling": {"n": 1, "top_logprobs": 2, "raw_logprobs": True, "logit_bias": {"9": 50}}},
    )
    work.run("--n", "3", "--max-new-tokens", "5", "--temperature", "1", "--slots", "4")
    rows = work.rows()
    assert [(row["index"], row["id"]) for row in rows] == [(0, 1), (1, "ids"), (2, "chat"), (3, 4), (4, 5)]
    assert [len(row["completions"]) for row in rows] == [3, 3, 3, 1, 1]
    for row in rows[:3]:
        for entry in row["completions"]:
            assert entry.keys() == {"text", "token_ids", "finish_reason", "stop"}
            assert 1 <= len(entry["token_ids"]) <= 5
            assert entry["finish_reason"] == ("stop" if entry["token_ids"][-1] == 1 else "length")
    (short,) = rows[3]["completions"]
    assert len(short["logprobs"]) == len(short["token_ids"]) <= 2
    (more,) = rows[4]["completions"]
    assert more.keys() == {"text", "token_ids", "raw_logprobs", "top_logprobs", "finish_reason", "stop"}
    assert more["token_ids"] == [9] * 5
    assert [pairs[0][0] for pairs in more["top_logprobs"]] == [9] * 5
    assert len(more["raw_logprobs"]) == 5


def test_the_same_prompt_on_two_lines_draws_different_samples(work: Work) -> None:
    """Guards against all lines sharing one seed, so that a file of equal prompts repeats one answer."""
    work.ask(*[{"prompt": "again"}] * 3)
    work.run("--max-new-tokens", "12", "--temperature", "1", "--n", "2")
    drawn = [tuple(entry["token_ids"]) for row in work.rows() for entry in row["completions"]]
    assert len(set(drawn)) == 6


def test_samples_are_in_order_however_they_finish(work: Work) -> None:
    """Guards against samples in the order of their lengths, which makes the first of them a biased choice."""
    work.ask(*[{"prompt": letter} for letter in "abcdefgh"])
    options = ("--max-new-tokens", "30", "--temperature", "1")
    work.run("--n", "3", *options)
    three = work.rows()
    work.run("--n", "1", *options, "--overwrite")
    assert [row[:1] for row in tokens_of(three)] == tokens_of(work.rows())


def test_bad_lines_are_all_reported_and_nothing_runs(work: Work) -> None:
    """Guards against a run that stops hours later at a line that was wrong from the start."""
    work.ask({"prompt": "a"}, {"prompt": 1}, {"prompt": "b"}, {"prompt": "c", "id": 1})
    message = work.run(expect=2)
    assert message.startswith("error: 2 bad lines in ")
    assert "\n  line 2: prompt must be a string" in message
    assert "\n  line 4: id 1 is already that of line 1" in message
    assert "Traceback" not in message
    assert not work.out.exists()


def test_lines_the_model_cannot_take_are_bad_lines_too(work: Work) -> None:
    """Guards against a token id past the vocabulary, which on a GPU kills the process without a word."""
    work.ask(
        {"prompt": "a"},
        {"prompt_ids": [3, len(VOCABULARY)]},
        {"prompt_ids": [3] * 600},
        {"prompt": "a", "sampling": {"stop_token_ids": [99]}},
        {"messages": [{"role": "nobody", "content": "a"}]},
    )
    message = work.run("--max-new-tokens", "8", expect=2)
    assert "4 bad lines in " in message
    assert f"\n  line 2: the prompt holds token id {len(VOCABULARY)}, outside the vocabulary" in message
    assert "\n  line 3: the prompt has 600 tokens and max_new_tokens is 8" in message
    assert "\n  line 4: stop_token_ids holds [99]" in message
    assert "\n  line 5: the tokenizer refuses the prompt: nobody may not speak" in message
    assert not work.out.exists()


def test_skip_bad_runs_the_good_lines_and_says_which_it_left(work: Work) -> None:
    """Guards against a line being left out without a word, and against seeds that shift when one is."""
    work.ask({"prompt": "a"}, {"prompt": 1}, {"prompt_ids": [999]}, {"prompt": "a"})
    message = work.run("--skip-bad", "--max-new-tokens", "6", "--temperature", "1")
    assert "passed over line 2: " in message
    assert "passed over line 3: " in message
    assert "2 bad lines passed over" in message
    rows = work.rows()
    assert [row["index"] for row in rows] == [0, 3]
    work.ask({"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}, {"prompt": "a"})
    work.run("--overwrite", "--max-new-tokens", "6", "--temperature", "1")
    whole = work.rows()
    assert tokens_of([whole[0], whole[3]]) == tokens_of(rows)


def test_a_resumed_run_draws_what_an_uninterrupted_one_draws(work: Work) -> None:
    """Guards against seeds that depend on which lines are left, so that later lines repeat earlier ones."""
    work.ask(*[{"prompt": "again"}] * 4, *[{"prompt": word} for word in ("one", "two", "three", "four")])
    options = ("--max-new-tokens", "8", "--temperature", "1", "--n", "2", "--slots", "3")
    work.run(*options)
    whole = work.rows()
    lines = work.out.read_bytes().splitlines(keepends=True)
    work.out.write_bytes(b"".join(lines[:3]) + lines[3][: len(lines[3]) // 2])
    message = work.run(*options)
    assert "5 prompts written" in message
    assert "3 were there already" in message
    assert tokens_of(work.rows()) == tokens_of(whole)


def test_an_inherited_max_length_counts_from_each_prompt(work: Work, tmp_path: Path) -> None:
    """Guards against a budget that counts the padding of the batch, and so changes when a run is resumed."""
    work.checkpoint = Path(shutil.copytree(work.checkpoint, tmp_path / "checkpoint"))
    settings = work.checkpoint / "generation_config.json"
    settings.write_text(json.dumps({"max_length": 16, "eos_token_id": None, "pad_token_id": 0}), "utf-8")
    work.ask({"prompt": "abcdefghij"}, {"prompt": "ab"})
    work.run()
    whole = work.rows()
    assert [len(tokens) for (tokens,) in tokens_of(whole)] == [6, 14]
    lines = work.out.read_bytes().splitlines(keepends=True)
    work.out.write_bytes(next(line for line in lines if b'"index":0' in line))
    work.run()
    assert tokens_of(work.rows()) == tokens_of(whole)


def test_a_finished_run_has_nothing_left_to_do(work: Work) -> None:
    """Guards against a second run repeating rows."""
    work.ask({"prompt": "a"}, {"prompt": "b"})
    work.run("--max-new-tokens", "2")
    before = work.out.read_bytes()
    assert "0 prompts written" in work.run("--max-new-tokens", "2")
    assert work.out.read_bytes() == before


def test_other_settings_are_refused_unless_told_to_overwrite(work: Work) -> None:
    """Guards against one file with rows of two settings, two prompts files or two models."""
    work.ask({"prompt": "a"}, {"prompt": "b"})
    work.run("--max-new-tokens", "2")
    before = work.out.read_bytes()
    message = work.run("--max-new-tokens", "3", "--seed", "5", expect=2)
    assert "sampling.max_new_tokens: 2 then, 3 now" in message
    assert "sampling.seed: 0 then, 5 now" in message
    work.ask({"prompt": "a"}, {"prompt": "c"})
    assert "prompts file (sha256)" in work.run("--max-new-tokens", "2", expect=2)
    assert work.out.read_bytes() == before
    work.run("--max-new-tokens", "3", "--overwrite")
    assert [len(row["completions"][0]["token_ids"]) <= 3 for row in work.rows()] == [True, True]


def test_slots_and_route_may_change_when_resuming(work: Work) -> None:
    """Guards against a run that ran out of memory not being able to go on with fewer slots."""
    work.ask({"prompt": "a"}, {"prompt": "b"})
    work.run("--max-new-tokens", "2")
    assert "0 prompts written" in work.run("--max-new-tokens", "2", "--slots", "1", "--route", "per_prompt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--route", "fastest"), "RolloutConfig.prefill_route must be one of packed, "),
        (("--slots", "0"), "RolloutConfig.max_slots must be at least 1, not 0"),
        (("--top-p", "1.5"), "SamplingConfig.top_p must be above 0 and at most 1, not 1.5"),
        (("--n", "0"), "SamplingConfig.n must be at least 1, not 0"),
        (("--dtype", "int8"), "dtype must be one of auto, float32, bfloat16, float16, not 'int8'"),
        (("--device", "abacus"), "device 'abacus' cannot be used: "),
        (("--model", "no/such/folder"), "cannot load the model 'no/such/folder': "),
    ],
)
def test_a_wrong_option_is_one_message_and_exit_code_2(work: Work, options: tuple[str, ...], message: str) -> None:
    """Guards against tracebacks for a user's slip, and against finding it only after the model has loaded."""
    work.ask({"prompt": "a"})
    shown = work.run(*options, expect=2)
    assert shown.startswith(f"error: {message}")
    assert "Traceback" not in shown
    assert not work.out.exists()


def test_a_generation_configuration_that_is_wrong(work: Work, tmp_path: Path) -> None:
    """Guards against a traceback where the model's own settings are none."""
    work.checkpoint = Path(shutil.copytree(work.checkpoint, tmp_path / "checkpoint"))
    (work.checkpoint / "generation_config.json").write_text('{"do_sample": true, "temperature": "hot"}', "utf-8")
    work.ask({"prompt": "a"})
    shown = work.run(expect=2)
    assert "generation_config.temperature must be a number, not 'hot'" in shown


def test_debug_shows_the_traceback(work: Work) -> None:
    """Guards against an error whose place cannot be found at all."""
    result = CliRunner().invoke(app, ["--debug", *work.command("--slots", "0")])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


@pytest.mark.parametrize(
    ("sent", "exit_code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)], ids=["kill -9", "Ctrl-C"]
)
def test_an_interrupted_run_goes_on_and_ends_as_if_it_had_not_been(
    work: Work, sent: signal.Signals, exit_code: int
) -> None:
    """Guards against rows held back in memory, rows lost or repeated, and a Ctrl-C that ends in a traceback."""
    count = 40
    work.ask(*[{"prompt": f"{chr(97 + line % 26)} question"} for line in range(count)])
    options = ("--max-new-tokens", "60", "--temperature", "1", "--slots", "2", "--logprobs")
    process = work.start(*options)
    work.wait_for_rows(3, process)
    process.send_signal(sent)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == exit_code
    left = work.out.read_bytes()
    done = left.count(b"\n")
    assert 3 <= done < count
    if sent == signal.SIGINT:
        assert "interrupted; the same command" in shown
        assert "Traceback" not in shown
        assert left.endswith(b"\n")
    message = work.run(*options)
    assert f"{done} were there already" in message
    assert work.out.read_bytes().startswith(left[: left.rindex(b"\n") + 1])
    resumed = work.rows()
    assert [row["index"] for row in resumed] == list(range(count))
    work.run(*options, "--overwrite")
    assert tokens_of(work.rows()) == tokens_of(resumed)


def test_the_prompts_are_never_the_output(tmp_path):
    """Guards against prompts replaced by completions."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [1]}\n')
    command = [sys.executable, "-m", "liveroll", "generate", "--model", str(tmp_path), "--overwrite"]
    done = subprocess.run(
        [*command, "--prompts", str(prompts), "--out", str(prompts)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"it would replace {prompts}" in done.stderr
    assert prompts.read_text() == '{"prompt_ids": [1]}\n'
