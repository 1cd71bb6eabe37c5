"""What trainers see of captured steps on a GPU."""

from __future__ import annotations

import runpy
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import torch
import zoo

from liveroll.adapters.deepspeed import (
    HybridEngineRollout,
    HybridEngineRolloutConfig,
    RolloutRequest,
    SamplingConfig,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=None)


def request(width, seed):
    rows = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=seed, lengths=(width, 2, width - 1, width))
    return (tensor.cuda() for tensor in zoo.left_pad(rows, pad_id=0))


def test_one_graph_for_every_width_and_optimizer_step():
    """Guards against a drop-in that captures in every call, or replays over weights of before."""
    model = zoo.build("llama").cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cfg = HybridEngineRolloutConfig(use_graph_capture=True, continuous_cache_capacity=64)
    rollout = HybridEngineRollout(SimpleNamespace(module=model), TOKENIZER, cfg)
    for step, (width, budget) in enumerate(((8, 16), (12, 12), (8, 8), (20, 30))):
        ids, mask = request(width, seed=step)
        batch = rollout.generate(
            RolloutRequest(ids, mask), SamplingConfig(budget, temperature=0.0, continuous_batch_size=4)
        )
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=budget, do_sample=False, pad_token_id=0)
        assert torch.equal(batch.input_ids, expected)
        assert batch.input_ids.is_cuda
        model(input_ids=expected, attention_mask=expected.ne(-1), labels=expected).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (rollout.rollouts.captures, rollout.rollouts.recapture_reasons) == (1, [])
    sampled = rollout.generate(RolloutRequest(ids, mask), SamplingConfig(8, 1.0, 0.9, 20, 3, 2))
    assert sampled.batch_size == 12
    held = rollout.rollouts.memory().kv
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]  # pages may lie outside of what PyTorch allocates
    rollout.shutdown()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] - before >= held > 0


def test_the_examples_on_a_gpu(capsys):
    """Guards against an example that runs on a CPU alone."""
    rewards = runpy.run_path(str(EXAMPLES / "grpo_minimal.py"))["main"](["--cuda", "--rounds", "9", "--seed", "1"])
    assert mean(rewards[-3:]) > mean(rewards[:3])
    divergences = runpy.run_path(str(EXAMPLES / "distill.py"))["main"](["--cuda", "--rounds", "12"])
    assert mean(divergences[-3:]) < mean(divergences[:3]) / 2
    assert "captures" in capsys.readouterr().out
