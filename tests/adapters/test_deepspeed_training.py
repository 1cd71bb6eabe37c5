"""Rollouts of a model that DeepSpeed trains: two real ranks, on the CPU."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import zoo
from ranks import Ranks

from liveroll import RolloutConfig as EngineConfig

# On its first process group in an environment, DeepSpeed compiles an operator.
pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed"),
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parents[2]
ROUNDS = 3
PATIENCE = 400
BUDGET = 8


def start(rank, model, stage=0, dtype="fp32", **settings):
    """DeepSpeed's engine of a model, trained with AdamW."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bf16"},
        **settings,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def prepare(rank):
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
    from liveroll.adapters import deepspeed as adapter

    return adapter


class Tokenizer:
    pad_token_id = 0
    eos_token_id = 1


def requests(rank, count=ROUNDS):
    """A batch a round, of different widths, with different prompts on each rank."""
    for number in range(count):
        rows = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=10 * number + rank, lengths=[3 + number, 7, 5 + number])
        yield zoo.left_pad(rows, pad_id=0)


def generated(engine, ids, mask):
    engine.module.eval()
    rows = engine.module.generate(
        ids, attention_mask=mask, max_new_tokens=BUDGET, do_sample=False, eos_token_id=1, pad_token_id=0
    )
    engine.module.train()
    return rows


def train_in_rounds(rank, report):
    """Each round rolls out greedily, compares with `model.generate`, and takes an optimizer step on the rollout."""
    adapter = prepare(rank)
    results = {}
    for stage in (0, 1, 2):
        for dtype in ("fp32", "bf16"):
            engine = start(rank, zoo.build("llama").train(), stage, dtype)
            cfg = adapter.HybridEngineRolloutConfig(use_graph_capture=True, continuous_cache_capacity=32)
            rollout = adapter.HybridEngineRollout(engine, Tokenizer(), cfg, engine_config=EngineConfig(fuse="auto"))
            fixed, seen = next(requests(rank=7)), []
            equal = []
            for ids, mask in requests(rank):
                sampling = adapter.SamplingConfig(BUDGET, 0.0, continuous_batch_size=2)
                batch = rollout.generate(adapter.RolloutRequest(ids, mask), sampling)
                equal.append(torch.equal(batch.input_ids, generated(engine, ids, mask)))
                seen.append(rollout.generate(adapter.RolloutRequest(*fixed), sampling).input_ids.tolist())
                targets = adapter.ResponseTokenBatch.from_rollout(batch)
                logits = targets.select_causal_logits(
                    engine(batch.input_ids, attention_mask=batch.attention_mask).logits
                )
                picked = torch.log_softmax(logits.float(), -1).gather(-1, targets.target_ids[..., None])[..., 0]
                # Away from what was just answered, so that the next answers differ.
                engine.backward((picked * targets.response_mask).sum() / targets.response_mask.sum())
                engine.step()
            changed = sum(now != then for then, now in itertools.pairwise(seen))
            fusion = rollout.rollouts.fusion
            results[stage, dtype] = {
                "equal": equal,
                "changed": changed,
                "captures": rollout.rollouts.captures,
                "reasons": rollout.rollouts.recapture_reasons,
                "eager": batch.rollout.stats.eager_reason,
                "fused": len(fusion.fused),
                "refused": sorted({reason.split(" ", 1)[1] for reason in fusion.refused.values()}),
                "dtype": str(next(engine.module.parameters()).dtype),
            }
            rollout.shutdown()
    torch.distributed.destroy_process_group()
    report(results)


def test_rounds_under_zero():
    """Guards against steps captured anew after optimizer steps, weights of before them, and moved flat buffers.

    Tokens equal those of `model.generate` in every round, while the weights change in every round.
    """
    with Ranks(train_in_rounds) as ranks:
        for rank in (0, 1):
            results = ranks.report(rank, patience=PATIENCE)
            assert len(results) == 6
            for (stage, dtype), result in results.items():
                assert result["equal"] == [True] * ROUNDS, (stage, dtype)
                assert result["changed"] >= ROUNDS - 2, (stage, dtype)
                assert (result["captures"], result["reasons"], result["eager"]) == (2, [], None)
                assert result["dtype"] == ("torch.float32" if dtype == "fp32" else "torch.bfloat16")
                assert result["fused"] == (0 if stage else 4), (stage, dtype)
                if stage:
                    assert result["refused"] == ["lies in a larger storage, which somebody else laid out"]
            assert ranks.ended(rank)


SCRIPT = """
from {package} import ResponseTokenBatch, RolloutConfig, RolloutRequest, SamplingConfig, build_rollout

rollout = build_rollout(RolloutConfig("hybrid_engine"), student_engine=engine, tokenizer=tokenizer)
batch = rollout.generate(RolloutRequest(ids, mask), SamplingConfig(8, temperature=0.0))
targets = ResponseTokenBatch.from_rollout(batch)
responses = [row[kept].tolist() for row, kept in zip(targets.target_ids, targets.response_mask)]
shapes = (batch.batch_size, batch.response_start_idx.tolist())
rollout.sync_weights(step=1)
rollout.shutdown()
"""


def swap_the_import(rank, report):
    """One script with DeepSpeed's import and with ours; then ours with DeepSpeed's own objects."""
    adapter = prepare(rank)
    from deepspeed.runtime import rollout as theirs
    from deepspeed.runtime.rollout import hybrid_engine_rollout

    engine = start(rank, zoo.build("llama").eval())
    ids, mask = next(requests(rank))
    seen = []
    for package in ("deepspeed.runtime.rollout", "liveroll.adapters.deepspeed"):
        names = {"engine": engine, "tokenizer": Tokenizer(), "ids": ids, "mask": mask}
        exec(SCRIPT.format(package=package), names)
        seen.append((names["responses"], names["shapes"]))
    ours = {}
    for name, home in (("HybridEngineRolloutConfig", hybrid_engine_rollout), ("SamplingConfig", theirs)):
        known = [field.name for field in dataclasses.fields(getattr(home, name))]
        mine = [field.name for field in dataclasses.fields(getattr(adapter, name))]
        ours[name] = mine[: len(known)] == known
    for name in ("RolloutConfig", "RolloutRequest", "RolloutBatch"):
        known = [field.name for field in dataclasses.fields(getattr(theirs, name))]
        ours[name] = [field.name for field in dataclasses.fields(getattr(adapter, name))][: len(known)] == known
    divergence = runpy.run_path(str(ROOT / "examples" / "distill.py"))["divergence"]
    logits, other = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    kept = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    for beta in (0.0, 0.25, 1.0):
        known = theirs.generalized_jsd_loss(logits, other, kept, beta=beta, temperature=0.7).loss
        torch.testing.assert_close(divergence(logits, other, kept, beta, temperature=0.7), known)
    rollout = adapter.HybridEngineRollout(engine, Tokenizer(), hybrid_engine_rollout.HybridEngineRolloutConfig(True))
    batch = rollout.generate(theirs.RolloutRequest(ids, mask), theirs.SamplingConfig(8, temperature=0.0))
    mixed = [row[kept.bool()].tolist() for row, kept in zip(*halves(batch), strict=True)]
    report((seen, ours, mixed, rollout.cfg.use_graph_capture))


def halves(batch):
    start = int(batch.response_start_idx[0])
    return batch.input_ids[:, start:], batch.attention_mask[:, start:]


def test_a_script_with_the_import_changed():
    """Guards against names, fields or an order that a script written for DeepSpeed does not find."""
    with Ranks(swap_the_import) as ranks:
        for rank in (0, 1):
            (theirs, mine), ours, mixed, graph = ranks.report(rank, patience=PATIENCE)
            assert theirs == mine
            assert all(ours.values()), ours
            assert (mixed, graph) == (mine[0], True)


def test_the_page():
    """Guards against an example that a newcomer copies and that fails."""
    page = (ROOT / "docs" / "deepspeed.md").read_text("utf-8")
    code = "\n".join(block.split("```")[0] for block in page.split("```python\n")[1:])
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"[1-4] torch\.Size\(\[8, \d\]\)", done.stdout.splitlines()[-1])


def share_a_model(rank, report):
    """Both ranks hold a half of the model by DeepSpeed's AutoTP, and roll out the same prompts."""
    adapter = prepare(rank)
    model = zoo.build("llama").train()
    engine = start(rank, model, tensor_parallel={"autotp_size": 2})
    rollout = adapter.HybridEngineRollout(engine, Tokenizer(), {"use_graph_capture": True})
    equal = []
    ids, mask = next(requests(rank=0))
    for call in range(3):
        if call == 2 and rank == 1:
            weight = model.model.norm.weight
            weight.data = weight.data.clone()
        batch = rollout.generate(adapter.RolloutRequest(ids, mask), adapter.SamplingConfig(BUDGET, 0.0))
        equal.append(torch.equal(batch.input_ids, generated(engine, ids, mask)))
    captures = rollout.rollouts.captures
    torch.manual_seed(rank)
    sampled = rollout.generate(adapter.RolloutRequest(ids, mask), adapter.SamplingConfig(BUDGET)).input_ids.tolist()
    held = tuple(model.model.layers[0].self_attn.k_proj.weight.shape)
    rollout.shutdown()
    torch.distributed.destroy_process_group()
    report((equal, captures, held, sampled))


def test_a_model_that_ranks_share():
    """Guards against ranks of a tensor-parallel group that capture, or draw samples, each for itself."""
    drawn = []
    with Ranks(share_a_model) as ranks:
        for rank in (0, 1):
            equal, captures, held, sampled = ranks.report(rank, patience=PATIENCE)
            assert (equal, held) == ([True] * 3, (8, 32))
            assert captures == 2
            drawn.append(sampled)
            assert ranks.ended(rank)
    assert drawn[0] == drawn[1]
