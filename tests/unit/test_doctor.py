"""`liveroll doctor`: what it tells of the environment and of a model, and the verdict on its parity."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo
from batch_work import save_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import liveroll.tools.doctor as doctor_tool
from liveroll import RolloutConfig, RolloutEngine
from liveroll.cli import app
from liveroll.tools.parity import LogprobGap, forced_logprobs, measure_parity, plain_sampling

PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=9)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def run(*options, expect=0):
    result = CliRunner().invoke(app, ["doctor", *map(str, options)])
    assert result.exit_code == expect, result.output + repr(result.exception)
    return result.stdout if expect < 2 else result.stderr


def test_a_gap_by_hand():
    """Guards against a divergence in the wrong direction, a ratio that is not one, and a percentile off by one."""
    ours = torch.full((200,), -2.0)
    theirs = ours.clone()
    theirs[:3] += torch.tensor([math.log(1.2), math.log(0.95), math.log(0.5)])
    gap = LogprobGap.of(ours, theirs)
    apart = [math.log(1.2), -math.log(0.95), math.log(2)]
    assert gap.tokens == 200
    assert gap.mean == pytest.approx(sum(apart) / 200, rel=1e-5)
    assert gap.max == pytest.approx(math.log(2), rel=1e-5)
    assert gap.p99 == pytest.approx(apart[1], rel=1e-4)
    terms = [ratio - 1 - math.log(ratio) for ratio in (1.2, 0.95, 0.5)]
    assert gap.kl == pytest.approx(sum(terms) / 200, rel=1e-4)
    assert gap.outside == pytest.approx(2 / 200)


def test_the_estimate_is_of_the_divergence():
    """Guards against an estimate that is not of the divergence from the distribution which tokens are drawn from."""
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(12, generator=generator).double().log_softmax(0) for _ in range(2))
    drawn = torch.multinomial(one.exp(), 400_000, replacement=True, generator=generator)
    exact = (one.exp() * (one - other)).sum().item()
    back = (other.exp() * (other - one)).sum().item()
    assert LogprobGap.of(one[drawn], other[drawn]).kl == pytest.approx(exact, rel=0.02)
    assert abs(exact - back) > 0.1 * exact


@pytest.mark.parametrize("rows", [1, 2, 99])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
@torch.no_grad()
def test_forced_logprobs_are_those_of_each_sequence(name, rows):
    """Guards against padding, positions or a shift by one in what the engine is compared with."""
    model = zoo.shared(name)
    stop = zoo.early_eos(model, PROMPTS, 12)
    sampling = replace(plain_sampling(12, 2, 3), stop_token_ids=(stop,))
    batch = RolloutEngine(model, config=RolloutConfig(page_size=4)).generate(PROMPTS, sampling)
    assert len({len(completion.token_ids) for completion in batch.completions}) > 1
    found = forced_logprobs(model, batch, rows)
    for row, completion in enumerate(batch.completions):
        logits = model(torch.tensor([[*completion.prompt_ids, *completion.token_ids]])).logits[0]
        logprobs = logits[len(completion.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(found[row, : len(expected)], expected, rtol=0, atol=2e-5)
        assert not found[row, len(expected) :].any()


@pytest.mark.parametrize("route", ["packed", "equal_width", "ordinary"])
def test_an_engine_is_near_its_trainer(route):
    """Guards against a verdict that rounding decides, and tokens that are left out of it."""
    model = zoo.build("llama")
    engine = RolloutEngine(model, config=RolloutConfig(prefill_route=route, page_size=4, max_slots=3))
    parity = measure_parity(engine, model, PROMPTS, plain_sampling(8, 2, 0))
    assert parity.near
    assert parity.sequences == 10
    assert {gap.tokens for gap in parity.gaps.values()} == {80}
    assert 0 <= parity.trainer.mean < 1e-5
    assert list(parity.gaps) == ["engine, trainer row by row", "engine, trainer in one batch", "trainer, both ways"]
    assert "as near to the trainer as rounding" in parity.verdict


def test_half_precision_is_held_to_float32():
    """Guards against a yardstick of other weights, and a bf16 trainer that is compared with itself only."""
    model = zoo.build("llama").bfloat16()
    engine = RolloutEngine(model, config=RolloutConfig(page_size=4))
    parity = measure_parity(engine, model, PROMPTS, plain_sampling(8, 2, 0))
    assert parity.dtype == torch.bfloat16
    assert model.dtype == torch.float32
    assert parity.near
    exact = forced_logprobs(model, parity.batch, 1)[parity.batch.loss_mask.bool()]
    ours = parity.batch.response_logprobs[parity.batch.loss_mask.bool()]
    assert parity.engine_exact == LogprobGap.of(ours, exact)
    assert 1e-4 < parity.trainer_exact.mean < 1
    assert parity.enough > parity.trainer_exact.mean


def test_a_trainer_with_dropout_is_far(checkpoint, monkeypatch):
    """Guards against a verdict that is always good, and an exit code that does not tell."""
    load = doctor_tool.load_checkpoint

    def in_training(*arguments):
        loaded = load(*arguments)
        for module in loaded.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        loaded.model.train()
        return loaded

    monkeypatch.setattr(doctor_tool, "load_checkpoint", in_training)
    found = json.loads(run("--model", checkpoint, "--parity", "--json", "--device", "cpu", expect=1))
    assert found["healthy"] is found["parity"]["near"] is False
    assert "far from the trainer" in found["parity"]["verdict"]


def test_the_environment_alone():
    """Guards against a command that cannot say what is missing."""
    told = run()
    for name in ("liveroll", "torch", "transformers", "triton", "cuda-python", "TF32"):
        assert name in told
    assert torch.__version__ in told
    assert json.loads(run("--json"))["healthy"] is True


def test_a_model(checkpoint):
    """Guards against a table that says what was asked for and not what was done."""
    told = json.loads(run("--model", checkpoint, "--device", "cpu", "--json"))["model"]
    assert told["rollout"] == "yes"
    assert told["captured"].startswith("yes")
    assert told["compiled"] == "no: auto compiles on a GPU only"
    assert told["fused"] == "4 groups of projections"
    other = json.loads(run("--model", checkpoint, "--device", "cpu", "--no-capture", "--no-fuse", "--json"))["model"]
    assert other["captured"] == "no: RolloutConfig.capture is False"
    assert other["fused"] == "no: RolloutConfig.fuse is False"
    for untried in (("--route", "ordinary"), ("--parity", "--max-new-tokens", "1")):
        told = json.loads(run("--model", checkpoint, "--device", "cpu", *untried, "--json"))["model"]
        assert told["captured"] == "not tried: the engine itself ran no decode step"


def test_a_model_that_ends_at_once():
    """Guards against nothing said of captured steps where random prompts are answered by a stop token."""
    told = json.loads(run("--model", "tiny", "--device", "cpu", "--json"))["model"]
    assert told["captured"].startswith("yes")


def test_a_model_that_cannot_be_rolled_out(tmp_path):
    """Guards against a traceback, or a good end, where the answer is no."""
    save_checkpoint(tmp_path)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        rope_scaling=rope,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    told = json.loads(run("--model", tmp_path, "--device", "cpu", "--json", expect=1))
    assert told["healthy"] is False
    assert "rotary embedding" in told["model"]["rollout"]
    told = json.loads(run("--model", tmp_path, "--device", "cpu", "--parity", "--json", expect=1))
    assert told["healthy"] is False
    assert "rotary embedding" in told["model"]["rollout"]


def test_parity_of_a_file(checkpoint, tmp_path):
    """Guards against other prompts than those of the file, and a table without the verdict."""
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "abcd"}\n\n{"prompt_ids": [3, 4]}\n', "utf-8")
    options = ("--model", checkpoint, "--device", "cpu", "--parity", "--prompts", prompts, "--n", "3")
    found = json.loads(run(*options, "--max-new-tokens", "5", "--json"))["parity"]
    assert found["sequences"] == 6
    assert 6 <= found["tokens"] <= 30
    told = run(*options, "--dtype", "bfloat16")
    for part in (
        "mean |d|",
        "KL (k3)",
        "engine, trainer row by row",
        "trainer, float32",
        "of 6 sequences",
        "The engine",
    ):
        assert part in told
    prompts.write_text('{"prompt": "ab"}\n{"prompt": "abcd", "sampling": {"top_p": 0.9}}\n', "utf-8")
    assert "line 2" in run(*options, expect=2)
    prompts.write_text("\n", "utf-8")
    assert "has no prompts" in run(*options, expect=2)
    prompts.write_text("nonsense\n", "utf-8")
    assert "1 bad line in" in (said := run(*options, expect=2))
    assert "--skip-bad" not in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--parity",), "--parity compares with a model; give --model"),
        (("--device", "cuda"), "--device is of a model; give --model"),
        (("--no-capture",), "--capture is of a model; give --model"),
        (("--model", "tiny", "--n", "3"), "--n is of --parity"),
        (("--model", "tiny", "--max-new-tokens", "3"), "--max-new-tokens is of --parity"),
        (("--model", "tiny", "--parity", "--n", "0"), "SamplingConfig.n must be at least 1"),
        (("--model", "tiny", "--parity", "--seed", "-1"), "SamplingConfig.seed must be at least 0"),
        (("--model", "tiny", "--parity", "--prompts", "none.jsonl"), "cannot read the prompts file none.jsonl"),
        (("--model", "tiny", "--slots", "0"), "RolloutConfig.max_slots must be at least 1"),
        (("--model", "tiny", "--route", "fast"), "RolloutConfig.prefill_route must be one of packed, "),
        (("--model", "tiny", "--dtype", "int8"), "dtype must be one of"),
        (("--model", "nowhere/none"), "cannot load the model 'nowhere/none': there is no such folder, "),
    ],
)
def test_bad_options(options, message, monkeypatch):
    """Guards against a traceback, or something else measured, where an option is wrong."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = run(*options, expect=2)
    assert "error: " in said
    assert message in said
