"""Models that DeepSpeed shards over two ranks, by ZeRO-3 or AutoTP, roll out as in one process."""

from __future__ import annotations

import os

import pytest
import torch
from ranks import WORLD
from rollouts import tokens
from scenarios import GREEDY, LEARNING_RATE, Outcomes, alone, batch_of, build, engine_of, prompts_of, rounds, run_all
from torch import distributed as dist

pytest.importorskip("deepspeed")


def initialize(model, **settings):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "torch_autocast": {"enabled": False},
        **settings,
    }
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def zero3(model, threshold=0):
    stage = {"stage": 3, "stage3_param_persistence_threshold": threshold, "stage3_prefetch_bucket_size": 0}
    return initialize(model, zero_optimization=stage)


def is_partitioned(engine):
    return all(parameter.numel() == 0 for parameter in engine.module.parameters())


def train(trainer, batch):
    loss = trainer(input_ids=batch, labels=batch).loss
    trainer.backward(loss)
    trainer.step()


def hooks_of(model):
    return [(list(m._forward_hooks.values()), list(m._forward_pre_hooks.values())) for m in model.modules()]


def rolled_out(gather, threshold=0):
    def scenario(rank):
        trainer = zero3(build(), threshold)
        hooks = hooks_of(trainer)
        engine = engine_of(trainer, gather=gather)
        seen = rounds(engine, prompts_of(rank), lambda: train(trainer.train(), batch_of(rank)))
        stats = engine.generate(prompts_of(rank), GREEDY).stats
        left = (bool(threshold) or is_partitioned(trainer), hooks_of(trainer) == hooks)
        engine.shutdown()
        trainer.destroy()
        return seen, (stats.captures, stats.replays > 0, stats.eager_reason), left

    return scenario


def unequal(rank):
    """Each rank in turn has no prompts, over both ways and two routes."""
    trainer = zero3(build())
    seen = []
    for gather in (True, False):
        for route in ("packed", "ordinary"):
            engine = engine_of(trainer, gather=gather, prefill_route=route, max_slots=2)
            for call in range(3):
                rows = [] if call == 2 * (1 - rank) else prompts_of(rank)
                alone = tokens(engine_of(build()).generate(rows, GREEDY)) if rows else []
                seen.append(tokens(engine.generate(rows, GREEDY)) == alone)
    left = is_partitioned(trainer)
    trainer.destroy()
    return seen, left


def subgroups(rank):
    """Each rank is a group of its own, and they generate at different times."""
    from deepspeed.utils import groups

    own = [dist.new_group([member]) for member in range(WORLD)][rank]
    import deepspeed

    class Units:
        """Tells DeepSpeed which ranks share data."""

        get_data_parallel_group = staticmethod(lambda: own)
        get_data_parallel_world_size = staticmethod(lambda: 1)
        get_data_parallel_rank = staticmethod(lambda: 0)
        get_model_parallel_group = staticmethod(lambda: own)
        get_model_parallel_world_size = staticmethod(lambda: 1)
        get_model_parallel_rank = staticmethod(lambda: 0)

    del groups
    with deepspeed.zero.Init(data_parallel_group=own, dtype=torch.float32):
        pass
    model = build()
    deepspeed.zero.Init(module=model, data_parallel_group=own, dtype=torch.float32)
    seen = []
    for gather in (True,):
        engine = engine_of(model, gather=gather)
        for _ in range(1 + rank):
            seen.append(tokens(engine.generate(prompts_of(rank), GREEDY)))
    return seen


def adapted(rank):
    """Inside PEFT."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    expected = tokens(engine_of(get_peft_model(build(), settings)).generate(prompts_of(rank), GREEDY))
    torch.manual_seed(0)
    trainer = zero3(get_peft_model(build(), settings))
    seen = []
    for gather in (True, False):
        seen.append(tokens(engine_of(trainer, gather=gather).generate(prompts_of(rank), GREEDY)) == expected)
        train(trainer.train(), batch_of(rank))
        with torch.no_grad():
            break
    trainer.destroy()
    return seen


def auto_tp(rank):
    """Divided by AutoTP."""
    trainer = initialize(build(), tensor_parallel={"autotp_size": WORLD}, zero_optimization={"stage": 0})
    engine = engine_of(trainer)
    seen = rounds(engine, prompts_of(0), lambda: train(trainer.train(), batch_of(0)))
    once = engine.captures
    stats = engine.generate(prompts_of(0), GREEDY).stats
    kv = engine.memory().kv
    engine.shutdown()
    trainer.destroy()
    return seen, (once, engine.captures, stats.captures, stats.replays > 0, stats.eager_reason), kv


SCENARIOS = {
    "gathered": rolled_out(True),
    "layer by layer": rolled_out(False),
    "persistent": rolled_out(False, 10**9),
    "unequal": unequal,
    "subgroups": subgroups,
    "adapted": adapted,
    "auto_tp": auto_tp,
}


def work(rank, report):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), DS_ACCELERATOR="cpu")
    run_all(SCENARIOS, rank, report)
    dist.destroy_process_group()
