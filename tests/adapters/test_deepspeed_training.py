"""Rollouts of a model that DeepSpeed trains: two real ranks, on the CPU."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
import zoo
from ranks import Ranks

from liveroll import RolloutConfig as EngineConfig

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")

ROUNDS = 4
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
                logits = targets.select_causal_logits(engine(ids_of(batch), attention_mask=batch.attention_mask).logits)
                picked = torch.log_softmax(logits.float(), -1).gather(-1, targets.target_ids[..., None])[..., 0]
                # Away from what was just answered, so that the next answers differ.
                engine.backward((picked * targets.response_mask).sum() / targets.response_mask.sum())
                engine.step()
            changed = sum(now != then for then, now in zip(seen, seen[1:], strict=False))
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


def ids_of(batch):
    return batch.input_ids


def test_rounds_under_zero():
    """Guards against steps captured anew after optimizer steps, weights of before them, and moved flat buffers.

    Tokens equal those of `model.generate` in every round, while the weights change in every round.
    """
    with Ranks(train_in_rounds) as ranks:
        for rank in (0, 1):
            results = ranks.report(rank, patience=200)
            assert len(results) == 6
            for (stage, dtype), result in results.items():
                assert result["equal"] == [True] * ROUNDS, (stage, dtype)
                assert result["changed"] >= ROUNDS - 2, (stage, dtype)
                assert (result["captures"], result["reasons"], result["eager"]) == (2, [], None)
                assert result["dtype"] == ("torch.float32" if dtype == "fp32" else "torch.bfloat16")
                if stage:
                    assert result["fused"] == 0
                    assert result["refused"] == ["lies in a larger storage, which somebody else laid out"]
            assert ranks.ended(rank)
