"""Trainers of TRL whose completions the engine generates: real training runs of the tiny model, on the CPU."""

from __future__ import annotations

import json
import math
import os
import runpy
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if find_spec("trl") is None:
    pytest.skip("needs TRL", allow_module_level=True)

import trl_training as work

from liveroll import ConfigError, EngineStateError, LogitsError, PromptError, RolloutConfig
from liveroll.adapters import trl as adapter
from liveroll.adapters.trl import RolloutFunction

# They are of transformers and TRL about one another, and about experiments.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def trl():
    import trl

    return trl


def history(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def check_run(trainer):
    """Losses of three steps are numbers, and the model has learnt from some of them."""
    losses, norms = history(trainer, "loss"), history(trainer, "grad_norm")
    assert len(losses) == 3
    assert all(map(math.isfinite, losses + norms))
    assert max(norms) > 0
    assert all(0 <= value <= 1.1 for value in history(trainer, "reward"))


def test_three_steps_with_a_rollout_function(trl, tmp_path):
    """Guards against rows that are not TRL's, weights of before, and captures in each step."""
    steps = []

    def rewards(prompts, completions, finish_reason, longest, **_):
        batch = rollouts.last
        assert completions == [completion.text for completion in batch.completions]
        assert finish_reason == [completion.finish_reason for completion in batch.completions]
        assert longest == [len(completion.token_ids) for completion in batch.completions]
        groups = [completions[start : start + work.GROUP] for start in range(0, len(completions), work.GROUP)]
        steps.append(
            {
                "rows": len(completions),
                "prompts": len(set(prompts)),
                "distinct": max(len(set(group)) for group in groups),
                "gap": work.gap(trainer.model, batch),
                "captures": rollouts.engine.captures,
                "forwarded": batch.stats.prefill_tokens,
                "shared": batch.stats.shared_tokens,
            }
        )
        return work.mark(prompts, completions)

    def columns(batch):
        return {"longest": [len(completion.token_ids) for completion in batch.completions]}

    rollouts = RolloutFunction(columns=columns)
    args = work.settings(trl.GRPOConfig, tmp_path)
    trainer = work.make(trl.GRPOTrainer, args, rewards, rollout_func=rollouts)
    trainer.train()
    check_run(trainer)
    assert [step["rows"] for step in steps] == [work.BATCH] * 3
    assert [step["prompts"] for step in steps] == [work.BATCH // work.GROUP] * 3
    assert max(step["distinct"] for step in steps) > 1
    assert max(step["gap"] for step in steps) < 1e-4
    assert all(step["shared"] == (work.GROUP - 1) * step["forwarded"] for step in steps)
    # Larger batches come first; after them the steps of each size are there.
    assert len(rollouts.engine.recapture_reasons) == 0
    assert steps[-1]["captures"] <= 4
    assert rollouts.engine.config.max_slots == work.BATCH
    rollouts.shutdown()
    assert rollouts.engine.memory().total == 0


def test_settings_of_the_trainer(trl, tmp_path):
    """Guards against a setting of `GRPOConfig` that does not reach the engine."""
    args = work.settings(
        trl.GRPOConfig,
        tmp_path,
        max_steps=1,
        max_completion_length=9,
        temperature=0.7,
        top_p=0.9,
        top_k=11,
        min_p=0.01,
        repetition_penalty=1.1,
        generation_kwargs={"min_new_tokens": 2, "eos_token_id": [2, 16], "stop_strings": ["99"]},
    )
    rollouts = RolloutFunction(RolloutConfig(max_slots=3), sleep=True)
    trainer = work.make(trl.GRPOTrainer, args, rollout_func=rollouts)
    trainer.train()
    assert {each.seed is None for each in rollouts.last.sampling} == {False}
    for each in rollouts.last.sampling:
        assert (each.max_new_tokens, each.min_new_tokens, each.do_sample) == (9, 2, True)
        assert (each.temperature, each.top_p, each.top_k, each.min_p) == (0.7, 0.9, 11, 0.01)
        assert (each.repetition_penalty, each.stop_token_ids, each.stop) == (1.1, (2, 16), ("99",))
    assert (rollouts.engine.config.max_slots, rollouts.engine.memory().kv) == (3, 0)
    greedy = SimpleNamespace(args=args, generation_kwargs={"do_sample": False, "temperature": 1.0})
    assert adapter.read_settings(greedy).temperature == 0.0


def test_the_memory_goes_back_after_a_rollout_that_fails(trl, tmp_path):
    """Guards against a trainer that goes on after an error, and has the KV memory of the rollout in its way."""
    rollouts = RolloutFunction(sleep=True)
    trainer = work.make(trl.GRPOTrainer, work.settings(trl.GRPOConfig, tmp_path), rollout_func=rollouts)
    next(trainer.model.parameters()).data.fill_(float("nan"))
    with pytest.raises(LogitsError):
        rollouts(["1+2="], trainer)
    assert rollouts.engine.memory().kv == 0


def test_seeds(trl, tmp_path):
    """Guards against runs that cannot be repeated, and rollouts of a run that repeat one another."""
    runs = []
    for seed in (1, 1, 2):
        texts = []

        def rewards(prompts, completions, texts=texts, **_):
            texts.append((tuple(prompts), tuple(completions)))
            return work.mark(prompts, completions)

        args = work.settings(trl.GRPOConfig, tmp_path, seed=seed, max_steps=2, shuffle_dataset=False)
        work.make(trl.GRPOTrainer, args, rewards, rollout_func=RolloutFunction()).train()
        runs.append(texts)
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_conversations(trl, tmp_path):
    """Guards against conversations that are tokenized without the trainer's chat template."""

    def rewards(prompts, completions, **_):
        assert all(f"{prompt[0]['content']}=" in work.SOLVED for prompt in prompts)
        return [len(completion[0]["content"]) / 24 for completion in completions]

    rollouts = RolloutFunction()
    trainer = work.make(trl.GRPOTrainer, work.settings(trl.GRPOConfig, tmp_path), rewards, rollout_func=rollouts)
    trainer.train_dataset = work.dataset(conversations=True)
    trainer.processing_class.chat_template = work.CHAT_TEMPLATE
    trainer.train()
    check_run(trainer)
    text = trainer.processing_class.decode(rollouts.last.completions[0].prompt_ids)
    assert text in work.SOLVED
    other = SimpleNamespace(
        processing_class=trainer.processing_class,
        chat_template="{{ messages[0].content }}{{ more }}{% if add_generation_prompt %}={% endif %}",
        chat_template_kwargs={"more": "+1"},
    )
    ids = adapter.tokenize_prompts([[{"role": "user", "content": "2+3"}]], other)
    assert trainer.processing_class.batch_decode(ids) == ["2+3+1="]


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_trainers_that_generate_by_themselves(trl, tmp_path, name):
    """Guards against a generation of RLOO or GRPO that is not the engine's, or is not on policy."""
    gaps = []

    def rewards(prompts, completions, **_):
        assert completions == [completion.text for completion in trainer.rollouts.last.completions]
        gaps.append(work.gap(trainer.model, trainer.rollouts.last))
        return work.mark(prompts, completions)

    trainer = work.make(
        getattr(adapter, f"{name}Trainer"), work.settings(getattr(trl, f"{name}Config"), tmp_path), rewards
    )
    assert isinstance(trainer, getattr(trl, f"{name}Trainer"))
    with pytest.raises(EngineStateError, match="before the first rollout"):
        _ = trainer.rollouts.engine
    trainer.train()
    check_run(trainer)
    assert len(gaps) == 3
    assert max(gaps) < 1e-4
    assert trainer.rollouts.engine.recapture_reasons == []


def test_tools_and_importance_sampling(trl, tmp_path):
    """Guards against turns after tool calls that `model.generate` writes, and log-probabilities that are lost there."""
    seen = []

    class Watching(adapter.GRPOTrainer):
        def compute_loss(self, model, inputs, *positional, **named):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            with torch.no_grad():
                logprobs = work.policy_logprobs(model, ids, mask, inputs["prompt_ids"].shape[1], self.temperature)
            drawn = inputs["completion_mask"] * inputs["tool_mask"]
            told = inputs["sampling_per_token_logps"]
            seen.append(
                {
                    "gap": float(((logprobs - told) * drawn).abs().max()),
                    "forced": float((told * (1 - drawn)).abs().max()),
                    "results": int((inputs["completion_mask"] * (1 - inputs["tool_mask"])).sum()),
                    "ratio": inputs["importance_sampling_ratio"],
                    "turns": self.rollouts.last.completions[0].prompt_ids,
                    "vllm": self.use_vllm,
                }
            )
            return super().compute_loss(model, inputs, *positional, **named)

    def rewards(completions, **_):
        return [float(len(turns)) for turns in completions]

    args = work.settings(trl.GRPOConfig, tmp_path, max_tool_calling_iterations=1, temperature=0.8)
    trainer = work.make(Watching, args, rewards, conversations=True, tools=[work.next_sum], importance_sampling=True)
    trainer.train()
    assert len(seen) == 3
    for step in seen:
        assert step["gap"] < 1e-4
        assert step["forced"] == 0
        assert step["results"] > 0
        torch.testing.assert_close(step["ratio"], torch.ones_like(step["ratio"]), rtol=0, atol=1e-2)
        assert step["vllm"] is False
        # The last rollout was the one after the tool: its prompts end with the tool's sum.
        assert trainer.processing_class.decode(step["turns"]).endswith("3+4=")
    assert history(trainer, "tools/call_frequency")[0] > 0
    assert max(history(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert all(map(math.isfinite, history(trainer, "loss")))


def test_positions_end(trl, tmp_path):
    """Guards against a conversation that has grown to the end of the model's positions stopping the training."""
    trainer = work.make(adapter.GRPOTrainer, work.settings(trl.GRPOConfig, tmp_path))
    positions = trainer.model.config.max_position_embeddings
    batch = trainer.rollouts.run(trainer, [[1, *[5, 14] * 4], [5] * (positions - 3)])
    assert [each.max_new_tokens for each in batch.sampling] == [24, 3]
    with pytest.raises(PromptError):
        trainer.rollouts.run(trainer, [[5] * positions])


def test_another_model(trl, tmp_path):
    """Guards against an engine that goes on with the model of the trainer before."""
    rollouts = RolloutFunction()
    engines = []
    for _ in range(2):
        trainer = work.make(
            trl.GRPOTrainer, work.settings(trl.GRPOConfig, tmp_path, max_steps=1), rollout_func=rollouts
        )
        trainer.train()
        engines.append(rollouts.engine)
        assert work.gap(trainer.model, rollouts.last) > 0
    assert engines[0] is not engines[1]
    assert engines[0].memory().total == 0


def test_what_is_refused(trl, tmp_path):
    """Guards against a setting of TRL that the engine does not do being passed over."""

    def run(prompts=("1+2=",), tools=None, rollouts=None, **changes):
        args = work.settings(trl.GRPOConfig, tmp_path, **changes)
        model, tokenizer = work.load_embedded()
        trainer = SimpleNamespace(
            args=args,
            model=model,
            processing_class=tokenizer,
            tools=tools,
            chat_template=None,
            chat_template_kwargs={},
            generation_kwargs={"max_new_tokens": 4, **(args.generation_kwargs or {})},
        )
        return (rollouts or RolloutFunction())(list(prompts), trainer)

    assert run()["finish_reason"] in (["stop"], ["length"])
    for name, value in (
        ("use_vllm", True),
        ("use_transformers_continuous_batching", True),
        ("cache_implementation", "static"),
    ):
        with pytest.raises(ConfigError, match=rf"GRPOConfig\.{name}"):
            run(**{name: value})
        with pytest.raises(ConfigError, match=rf"GRPOConfig\.{name}"):
            work.make(adapter.GRPOTrainer, work.settings(trl.GRPOConfig, tmp_path, **{name: value}))
    with pytest.raises(ConfigError, match="generation_kwargs holds num_beams=2"):
        run(generation_kwargs={"num_beams": 2})
    with pytest.raises(ConfigError, match="generation_kwargs holds num_beams=2"):
        work.make(adapter.RLOOTrainer, work.settings(trl.RLOOConfig, tmp_path, generation_kwargs={"num_beams": 2}))
    with pytest.raises(ConfigError, match="use liveroll"):
        run(tools=[work.next_sum])
    with pytest.raises(ConfigError, match="generates by itself"):
        work.make(adapter.GRPOTrainer, work.settings(trl.GRPOConfig, tmp_path), rollout_func=RolloutFunction())
    args = work.settings(trl.GRPOConfig, tmp_path, vllm_importance_sampling_correction=False)
    with pytest.raises(ConfigError, match="vllm_importance_sampling_correction forbids"):
        work.make(adapter.GRPOTrainer, args, importance_sampling=True)
    with pytest.raises(ConfigError, match="columns makes lost of 0 entries for 1 completions"):
        run(rollouts=RolloutFunction(columns=lambda batch: {"lost": []}))
    with pytest.raises(ConfigError, match="RolloutConfig"):
        RolloutFunction({"max_slots": 3})
    picture = [{"role": "user", "content": [{"type": "image", "image": None}]}]
    for prompts, message in (
        ([], "list of strings"),
        ([["1+2="]], "prompt 0 holds '1\\+2='"),
        (["1+2=", 3], "prompt 0 is '1\\+2='; prompts must all be"),
        ([[{"content": "1"}]], "no message"),
        ([picture], "more than text"),
    ):
        with pytest.raises(PromptError, match=message):
            run(prompts)
    trainer = work.make(adapter.GRPOTrainer, work.settings(trl.GRPOConfig, tmp_path))
    with pytest.raises(PromptError, match="images"):
        trainer._generate_single_turn([[5]], [["picture"]], {}, 4)


def test_two_processes(tmp_path):
    """Guards against processes that draw the same samples for a prompt that they share, or wait for one another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["--main_process_port", str(port), str(HERE / "trl_two_processes.py"), str(tmp_path)]
    path = os.pathsep.join([str(HERE), *sys.path])
    done = subprocess.run(
        launch, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}, timeout=280
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text("utf-8")) for rank in (0, 1))
    for step in range(3):
        ours, theirs = first["steps"][step], second["steps"][step]
        assert ours["prompts"] == theirs["prompts"]
        assert len(set(ours["prompts"])) == 1
        assert max(ours["gap"], theirs["gap"]) < 1e-4
    # Half of the group on each: were the streams the same, they would have sampled the same in every step.
    assert [step["completions"] for step in first["steps"]] != [step["completions"] for step in second["steps"]]
    assert first["weights"] == second["weights"] != first["weights_before"]
    assert (first["recaptures"], second["recaptures"]) == ([], [])


def test_the_page_and_the_example(tmp_path, monkeypatch, capsys):
    """Guards against an example that a newcomer copies and that fails."""
    monkeypatch.chdir(tmp_path)
    root = HERE.parents[1]
    names = {"__name__": "example"}
    for block in (root / "docs" / "trl.md").read_text("utf-8").split("```python\n")[1:]:
        exec(block.split("```")[0], names)
    check_run(names["trainer"])
    example = runpy.run_path(str(root / "examples" / "trl_grpo_gemma.py"))
    model = str(root / "src" / "liveroll" / "assets" / "sums")
    trainer = example["main"]([model, "--steps", "3", "--batch", "8", "--group", "4", "--out", str(tmp_path)])
    check_run(trainer)
    assert "tokens/s in the last rollout" in capsys.readouterr().out


def test_without_trl(monkeypatch):
    """Guards against an import error that does not say what to install."""
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(vars(adapter), "RLOOTrainer", raising=False)
    with pytest.raises(ImportError, match=r'pip install "liveroll\[trl\]"'):
        _ = adapter.RLOOTrainer
    with pytest.raises(AttributeError, match="no attribute 'PPOTrainer'"):
        _ = adapter.PPOTrainer
