"""`liveroll plan` explains a call for a checkpoint, a file of prompts or lengths, and a file of costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from batch_work import save_checkpoint
from typer.testing import CliRunner

from liveroll import CostModel, RolloutConfig
from liveroll.cli import app
from liveroll.model.identity import describe_origin
from liveroll.planning.costs_file import CostsFile, write_costs
from liveroll.tools.checkpoint import load_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def run(checkpoint, *options, expect=0):
    command = ["plan", "--model", str(checkpoint), "--device", "cpu", *map(str, options)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == expect, result.output + repr(result.exception)
    return result.stdout if expect == 0 else result.stderr


def save_costs(path, checkpoint, **costs):
    model = load_checkpoint(str(checkpoint), "auto", "cpu").model
    write_costs(path, CostsFile(CostModel(**costs), describe_origin(model, RolloutConfig(), 1), ()))
    return path


def test_lengths(checkpoint):
    """Guards against a plan of other prompts than asked for, and numbers that do not add up."""
    plan = json.loads(run(checkpoint, "--lengths", "64,16,16", "--max-new-tokens", "5", "--json"))
    assert (plan["route"], plan["configured"], plan["rows"]) == ("ordinary", "auto", 3)
    assert (plan["lengths"], plan["decode_steps"]) == ([64, 16, 16], 4)
    assert plan["costs"]["fixed_ms"] == 25.0
    assert plan["geometry"] == {"layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 8, "element_bytes": 4}
    candidates = {entry["route"]: entry for entry in plan["candidates"]}
    assert candidates["bucketed"]["forwards"] == [{"rows": 3, "width": 64}]
    assert candidates["packed"]["forwards"] == [{"rows": 3, "width": None}]
    assert len(candidates["per_prompt"]["forwards"]) == 3
    assert candidates["per_prompt"]["token_ms"] == pytest.approx(9.6)
    for entry in plan["candidates"]:
        parts = [entry[name] for name in ("fixed_ms", "token_ms", "attention_ms", "kv_ms", "decode_ms")]
        assert entry["cost_ms"] == pytest.approx(sum(parts))


def test_the_table(checkpoint):
    """Guards against a table without the choice, or without the reason for what was not eligible."""
    table = run(checkpoint, "--lengths", "400,10,10", "--max-slots", "2", "--max-new-tokens", "4")
    assert "> packed" in table
    assert "1 x 10, 1 x 400" in table
    assert "auto may not take ordinary: 3 rows do not fit 2 slots" in table
    assert "auto takes packed: 3 rows; 2 are admitted first" in table
    assert "configuration says equal_width" in run(checkpoint, "--lengths", "5,6", "--route", "equal_width")


def test_a_file_of_prompts(checkpoint, tmp_path):
    """Guards against lines whose own settings, or samples, are not counted."""
    prompts = tmp_path / "in.jsonl"
    lines = [{"prompt": "abcd"}, {"prompt_ids": [3, 4], "sampling": {"max_new_tokens": 9, "n": 3}}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    plan = json.loads(run(checkpoint, "--prompts", prompts, "--max-new-tokens", "2", "--json"))
    assert (plan["rows"], sorted(plan["lengths"]), plan["decode_steps"]) == (4, [2, 2, 2, 4], 8)
    prompts.write_text('{"prompt": 5}\n', "utf-8")
    assert "line 1" in run(checkpoint, "--prompts", prompts, expect=2)


def test_a_file_of_costs(checkpoint, tmp_path):
    """Guards against measured costs that change nothing, and those of something else that are taken."""
    path = save_costs(tmp_path / "costs.json", checkpoint, ordinary_step_ms=50.0, fixed_ms=2.0)
    plan = json.loads(run(checkpoint, "--lengths", "64,16,16", "--costs", path, "--json"))
    assert plan["route"] == "packed"
    assert plan["costs"]["fixed_ms"] == 2.0
    message = run(checkpoint, "--lengths", "64,16", "--costs", path, "--dtype", "bfloat16", expect=2)
    assert "error: the costs file" in message
    assert "dtype is 'float32' there and 'bfloat16' here" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give either --prompts or --lengths"),
        (("--lengths", "3", "--prompts", "in.jsonl"), "give either --prompts or --lengths"),
        (("--lengths", "3,x"), "--lengths must be whole numbers separated by commas, not '3,x'"),
        (("--lengths", ""), "--lengths must be whole numbers"),
        (("--lengths", "3,0"), "--lengths holds 0; every prompt needs at least one token"),
        (("--lengths", "600", "--max-new-tokens", "4"), "max_position_embeddings is 512"),
        (
            ("--lengths", "3,99999999999999"),
            "--lengths holds 99999999999999, and the model's max_position_embeddings is",
        ),
        (("--lengths", "3", "--route", "fast"), "RolloutConfig.prefill_route must be one of packed, "),
        (("--lengths", "3", "--max-slots", "0"), "RolloutConfig.max_slots must be at least 1"),
        (("--lengths", "3", "--costs", "none.json"), "cannot read the costs file none.json"),
        (("--prompts", "none.jsonl"), "cannot read the prompts file none.jsonl"),
    ],
)
def test_bad_options(checkpoint, options, message):
    """Guards against a traceback, or a plan of something else, where an option is wrong."""
    said = run(checkpoint, *options, expect=2)
    assert "error: " in said
    assert message in said


def test_a_file_without_prompts(checkpoint, tmp_path):
    """Guards against an error that does not name the file."""
    prompts = tmp_path / "in.jsonl"
    prompts.write_text("\n", "utf-8")
    assert "in.jsonl has no prompts" in run(checkpoint, "--prompts", prompts, expect=2)
