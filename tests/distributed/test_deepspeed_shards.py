"""Models that DeepSpeed shards over two ranks, by ZeRO-3 or AutoTP, roll out as in one process."""

from __future__ import annotations

import os

import pytest
import torch
from ranks import WORLD
from rollouts import tokens
from scenarios import GREEDY, LEARNING_RATE, alone, batch_of, build, engine_of, hooks_of, prompts_of, roll_out
from torch import distributed as dist

pytest.importorskip("deepspeed")


def initialize(model, mpu=None, **settings):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        **settings,
    }
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), mpu=mpu, config=config)[0]


def zero3(model, threshold=0, mpu=None):
    stage = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    return initialize(model, mpu, zero_optimization=stage)


def is_partitioned(engine):
    return all(parameter.numel() == 0 for parameter in engine.module.parameters())


def train(trainer, batch):
    trainer.train()
    loss = trainer(input_ids=batch, labels=batch).loss
    trainer.backward(loss)
    trainer.step()


def rolled_out(gather, threshold=0):
    def scenario(rank):
        trainer = zero3(build(), threshold)
        hooks = hooks_of(trainer)
        engine = engine_of(trainer, gather_weights=gather)
        rolled = roll_out(engine, prompts_of(rank), lambda: train(trainer, batch_of(rank)))
        left = (bool(threshold) or is_partitioned(trainer), hooks_of(trainer) == hooks)
        trainer.destroy()
        return rolled, left

    return scenario


def unequal(rank):
    """Each rank in turn has no prompts, over both ways and two routes."""
    trainer = zero3(build())
    seen = []
    for gather in (True, False):
        for route in ("packed", "ordinary"):
            engine = engine_of(trainer, gather_weights=gather, prefill_route=route, max_slots=2)
            for call in range(3):
                rows = [] if call == 2 * (1 - rank) else prompts_of(rank)
                alone = tokens(engine_of(build()).generate(rows, GREEDY)) if rows else []
                seen.append(tokens(engine.generate(rows, GREEDY)) == alone)
    left = is_partitioned(trainer)
    trainer.destroy()
    return seen, left


def failing(rank):
    """A hook of the trainer fails in the first forward of a layer on gathered weights, and is removed."""

    class NoError(Exception):
        pass

    def fail(*_):
        raise NoError

    trainer = zero3(build())
    before = hooks_of(trainer)
    engine = engine_of(trainer, gather_weights=True)
    handle = trainer.module.model.layers[0].mlp.register_forward_pre_hook(fail)
    with pytest.raises(NoError):
        engine.generate(prompts_of(rank), GREEDY)
    handle.remove()
    left = is_partitioned(trainer) and hooks_of(trainer) == before
    seen = tokens(engine.generate(prompts_of(rank), GREEDY))
    trainer.destroy()
    return left, seen


def subgroups(rank):
    """Each rank is a group of its own, and they generate different numbers of times."""
    import deepspeed

    own = [dist.new_group([member]) for member in range(WORLD)][rank]
    model = build()
    deepspeed.zero.Init(module=model, data_parallel_group=own, dtype=torch.float32)
    engine = engine_of(model, gather_weights=True)
    return [tokens(engine.generate(prompts_of(rank), GREEDY)) for _ in range(1 + rank)]


def adapted(rank):
    """Inside PEFT."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    expected = tokens(engine_of(get_peft_model(build(), settings)).generate(prompts_of(rank), GREEDY))
    torch.manual_seed(0)
    trainer = zero3(get_peft_model(build(), settings))
    seen = []
    for gather in (True, False, True):
        seen.append(tokens(engine_of(trainer, gather_weights=gather).generate(prompts_of(rank), GREEDY)) == expected)
    train(trainer, batch_of(rank))
    seen.append(tokens(engine_of(trainer).generate(prompts_of(rank), GREEDY)) != expected)
    left = is_partitioned(trainer)
    trainer.destroy()
    return seen, left


def auto_tp(rank):
    """Divided by AutoTP."""
    trainer = initialize(build(), tensor_parallel={"autotp_size": WORLD}, zero_optimization={"stage": 0})
    rolled = roll_out(engine_of(trainer), prompts_of(0), lambda: train(trainer, batch_of(0)))
    trainer.destroy()
    return rolled


SCENARIOS = {
    "gathered": rolled_out(True),
    "layer by layer": rolled_out(False),
    "persistent": rolled_out(False, 10**9),
    "unequal": unequal,
    "failing": failing,
    "subgroups": subgroups,
    "adapted": adapted,
    "auto_tp": auto_tp,
}


def prepare(rank, world=WORLD):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled, which takes minutes


@pytest.fixture(scope="module")
def expected():
    return [alone(prompts_of(rank), [batch_of(0), batch_of(1)]) for rank in range(WORLD)]


def test_gathered_weights(outcomes, expected):
    """Guards against hooks that partition weights after a forward, and weights or hooks left otherwise than found."""
    for rank, (rolled, left) in enumerate(outcomes.of("gathered")):
        assert rolled.seen == expected[rank]
        assert rolled.as_captured == (True, None)
        assert left == (True, True)


@pytest.mark.parametrize("kind", ["layer by layer", "persistent"])
def test_weights_gathered_layer_by_layer(outcomes, expected, kind):
    """Guards against ranks that run different numbers of forwards, and captured steps without gathering hooks."""
    for rank, (rolled, left) in enumerate(outcomes.of(kind)):
        assert rolled.seen == expected[rank]
        replayed, eager_reason = rolled.as_captured
        assert (rolled.captures, replayed) == (0, False)
        assert "gather" in eager_reason
        assert left == (True, True)


def test_ranks_with_unequal_or_no_prompts(outcomes):
    """Guards against a rank that ends while others wait for its part of the weights."""
    assert outcomes.of("unequal") == [([True] * 12, True)] * WORLD


def test_a_failed_call_leaves_the_weights_and_hooks(outcomes, expected):
    """Guards against weights that stay gathered, and hooks that stay away, after an exception."""
    for rank, (left, seen) in enumerate(outcomes.of("failing")):
        assert left
        assert seen == expected[rank][0][0]


def test_ranks_of_different_groups_do_not_wait_for_one_another(outcomes, expected):
    """Guards against votes over all ranks where the weights are of some."""
    for rank, seen in enumerate(outcomes.of("subgroups")):
        assert seen == [expected[rank][0][0]] * (1 + rank)


def test_adapters(outcomes):
    """Guards against adapters whose weights are not gathered with the model's."""
    assert outcomes.of("adapted") == [([True] * 4, True)] * WORLD


def test_auto_tp(outcomes):
    """Guards against a group that is not found, and pages for the heads of all ranks."""
    expected = alone(prompts_of(0), [batch_of(0)])
    whole = engine_of(build())
    whole.generate(prompts_of(0), GREEDY)
    for rolled in outcomes.of("auto_tp"):
        assert rolled.seen == expected
        assert rolled.stats.captures == 0
        assert rolled.as_captured == (True, None)
        assert rolled.kv == whole.memory().kv / WORLD


def test_all_ranks_leave(outcomes):
    """Guards against engines that keep a rank from leaving its group."""
    assert outcomes.all_ended
