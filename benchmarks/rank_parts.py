"""What a rank does in each part of `ranks.py`: rounds of rollouts with optimizer steps between them, or timed cases."""

from __future__ import annotations

import importlib.util
import math
import random
import tempfile
import time
import warnings
from itertools import pairwise
from typing import Any

import torch
from common import COPY_BYTES_PER_SECOND, build, median, milliseconds, prompts_of
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig

TINY = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
    "use_sliding_window": False,
}
RATE = 0.05
"""Learning rate of the descent between rounds."""
STD = 0.2
"""Deviation of the tiny model's weights: large, so that its two most likely tokens are seldom within rounding."""
DEEPSPEED = ("autotp", "zero3")
PARTS = ("tp", "dp", "fsdp", "fsdp_layers", "tail", *(DEEPSPEED if importlib.util.find_spec("deepspeed") else ()))
DIVIDED = ("tp", "autotp")
"""Parts in which all ranks compute each layer together."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = {"32x16/128": [16] * 32, "1x512+31x16/128": [512] + [16] * 31}


def make(name: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    if name != "tiny":
        return build(name, dtype, device)
    settings = dict(TINY)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, STD, generator=generator)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.to(device, dtype).eval()


def divide(model: PreTrainedModel) -> PreTrainedModel:
    """The model sharded by its own plan over all ranks; loaded from files, which is the only public way."""
    with tempfile.TemporaryDirectory() as own, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        folder = [own]
        dist.broadcast_object_list(folder)
        model.save_pretrained(folder[0], is_main_process=dist.get_rank() == 0)
        dist.barrier()
        kwargs = {"dtype": model.dtype, "attn_implementation": "sdpa"}
        divided = AutoModelForCausalLM.from_pretrained(folder[0], tp_plan="auto", **kwargs)
        dist.barrier()
    divided.generation_config = model.generation_config
    return divided.eval()


def divide_layers(model: PreTrainedModel) -> None:
    """Share the layers of a model without memory out to all ranks, the way its own plan does."""
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    if not model.config.tie_word_embeddings:
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})


def floor_ms(model: PreTrainedModel, lengths: list[int], new: int) -> float:
    """Milliseconds that the decode steps of a rank take at least: its weights, and the keys and values of its heads."""
    own = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    weights = sum(parameter.nbytes for parameter in own)
    if not model.config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes
    projections = (model.model.layers[0].self_attn.k_proj, model.model.layers[0].self_attn.v_proj)
    widths = [p.weight.to_local() if isinstance(p.weight, DTensor) else p.weight for p in projections]
    token = model.config.num_hidden_layers * sum(map(len, widths)) * model.dtype.itemsize
    keys = sum((new - 1) * length + new * (new - 1) // 2 for length in lengths)
    return ((new - 1) * weights + keys * token) / COPY_BYTES_PER_SECOND * 1e3


def shard(model: PreTrainedModel) -> PreTrainedModel:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def initialize(part: str, model: PreTrainedModel) -> Any:
    """The model as DeepSpeed trains it, divided by AutoTP or partitioned by ZeRO-3."""
    import deepspeed

    auto_tp = {"tensor_parallel": {"autotp_size": dist.get_world_size()}, "zero_optimization": {"stage": 0}}
    zero3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": model.dtype == torch.bfloat16},
        **(auto_tp if part == "autotp" else zero3),
    }
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train_by_deepspeed(trainer: Any, batch: torch.Tensor) -> None:
    """One step of its own optimizer."""
    trainer.train()
    trainer.backward(trainer(input_ids=batch, labels=batch).loss)
    trainer.step()
    trainer.eval()


def train(model: Any, batch: torch.Tensor, average: bool) -> None:
    """One step of plain descent; `average` over ranks that hold whole models."""
    model.train()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if average:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            # Steps of one size, so that rounding of small gradients does not decide about tokens.
            parameter.sub_(parameter.grad, alpha=RATE)
            parameter.grad = None
    model.eval()


def batches(vocab_size: int, ranks: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(vocab_size, (2, 32), generator=generator).to(device) for _ in range(ranks)]


def tokens_of(engine: RolloutEngine, prompts: list[list[int]], new: int) -> list[list[int]]:
    batch = engine.generate(prompts, SamplingConfig(max_new_tokens=new, temperature=0.0, stop_token_ids=()))
    return [list(completion.token_ids) for completion in batch.completions]


def requests(part: str, rank: int, vocab_size: int) -> list[list[int]]:
    """All ranks have one batch of prompts under tensor parallelism, and each its own elsewhere."""
    own = 0 if part in DIVIDED else rank
    return prompts_of([4 + (7 * index + 3 * own) % 40 for index in range(8 + own % 3)], vocab_size, seed=1 + own)


def engine_for(model: Any, gather: bool | str = "auto") -> RolloutEngine:
    return RolloutEngine(model, config=RolloutConfig(max_slots=16, max_length=128, gather_weights=gather))


def expected(part: str, dtype: torch.dtype, device: str, rounds: int, ranks: int) -> list[list[list[list[int]]]]:
    """Tokens `[round][rank][prompt]` of one model that is not sharded."""
    model = make("tiny", dtype, device)
    engine = engine_for(model)
    vocab_size, seen = model.config.vocab_size, []
    given = batches(vocab_size, 1 if part in DIVIDED else ranks, device)
    for index in range(rounds):
        if index:
            train(model, torch.cat(given), average=False)
        seen.append([tokens_of(engine, requests(part, rank, vocab_size), 24) for rank in range(ranks)])
    engine.shutdown()
    return seen


def run_rounds(part: str, dtype: torch.dtype, device: str, rounds: int) -> dict[str, Any]:
    """Rounds of a part, with what they show."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wanted: list[Any] = [expected(part, dtype, device, rounds, ranks) if rank == 0 else None]
    dist.broadcast_object_list(wanted)
    model = make("tiny", dtype, device)
    vocab_size = model.config.vocab_size
    if part == "tp":
        model = divide(model)
    elif part.startswith("fsdp"):
        model = shard(model)
    trainer = initialize(part, model) if part in DEEPSPEED else model
    own = 0 if part in DIVIDED else rank
    batch = batches(vocab_size, ranks, device)[own]
    engine = engine_for(trainer, gather=part != "fsdp_layers")
    prompts, same, captures, times = requests(part, rank, vocab_size), [], [], []
    new = [before != after for before, after in pairwise(rows[rank] for rows in wanted[0])]
    for index in range(rounds):
        if index:
            if part in DEEPSPEED:
                train_by_deepspeed(trainer, batch)
            else:
                train(model, batch, average=part == "dp")
        dist.barrier()
        started = time.perf_counter()
        seen = tokens_of(engine, prompts, 24)
        times.append(round((time.perf_counter() - started) * 1e3, 1))
        pairs = [pair for rows in zip(seen, wanted[0][index][rank], strict=True) for pair in zip(*rows, strict=True)]
        same.append(round(sum(mine == theirs for mine, theirs in pairs) / len(pairs), 4))
        captures.append(engine.captures)
    result: dict[str, Any] = {"same tokens": same, "captures": captures, "replays": engine.replays, "ms": times}
    result["steps that changed tokens"] = sum(new)
    if part in DIVIDED:
        if rank == ranks - 1:
            projection = model.model.layers[1].mlp.down_proj
            projection.weight = torch.nn.Parameter(projection.weight.detach().clone())
        tokens_of(engine, prompts, 24)
        result["captures after a move on the last rank"] = engine.captures
        result["recapture reasons"] = engine.recapture_reasons
    engine.shutdown()
    result["bytes after shutdown"] = engine.memory().total
    if part in DEEPSPEED:
        trainer.destroy()
    return result


def time_cases(part: str, name: str, device: str) -> dict[str, Any]:
    """Wall times of the cases on a large model in bf16."""
    rank = dist.get_rank()
    model = build(name, torch.bfloat16, device, divide=divide_layers if part == "tp" else None)
    model = shard(model) if part.startswith("fsdp") else model
    config = RolloutConfig(max_slots=32, max_length=640, compile=False, gather_weights=part != "fsdp_layers")
    engine = RolloutEngine(model, config=config)
    result: dict[str, Any] = {}
    for case, lengths in CASES.items():
        prompts = prompts_of(lengths, model.config.vocab_size, seed=1 if part == "tp" else 1 + rank)
        times = milliseconds(lambda prompts=prompts: tokens_of(engine, prompts, 128), repeats=3)
        floor = floor_ms(model, lengths, 128)
        result[case] = {
            "ms": median(times),
            "all ms": [round(each, 1) for each in times],
            "share of the floor": round(floor / median(times), 3),
        }
    result["captures"] = engine.captures
    result["GiB reserved"] = round(torch.cuda.memory_reserved() / 2**30, 1) if device != "cpu" else None
    engine.shutdown()
    return result


def time_tail(name: str, device: str) -> dict[str, Any]:
    """Long-tail answers, as long for all samples of a prompt, shared out by the queue and by a static split."""
    rank = dist.get_rank()
    model = make(name, torch.bfloat16, device)
    draw = random.Random(rank)
    prompts = prompts_of([draw.randint(16, 64) for _ in range(16)], model.config.vocab_size, seed=1 + rank)
    longest, median_length = (48, 12) if name == "tiny" else (512, 128)
    budgets = [min(longest, max(8, round(draw.lognormvariate(math.log(median_length), 1.0)))) for _ in prompts]
    sampling = [SamplingConfig(max_new_tokens=budget, n=8, seed=1, stop_token_ids=()) for budget in budgets]
    result: dict[str, Any] = {"tokens asked for": 8 * sum(budgets), "captures": 0}
    seen = []
    for balance in ("static", "queue"):
        config = RolloutConfig(max_slots=32, max_length=longest + 64, balance=balance)
        engine = RolloutEngine(model, config=config)
        batches = []

        def call(engine=engine, batches=batches) -> None:
            dist.barrier()
            batches.append(engine.generate(prompts, sampling, group=dist.group.WORLD))

        times = milliseconds(call, repeats=3)
        waited = [batch.stats.waited_seconds / batch.stats.seconds for batch in batches[1:]]
        result[balance] = {
            "ms": median(times),
            "all ms": [round(each, 1) for each in times],
            "waited": round(max(waited), 3),
            "tokens sampled here": batches[-1].stats.new_tokens,
        }
        result["captures"] += engine.captures
        seen.append([completion.token_ids for completion in batches[-1].completions])
        engine.shutdown()
    result["same tokens both ways"] = seen[0] == seen[1]
    return result


def run_part(part: str, model: str, rounds: int, device: str) -> dict[str, Any]:
    """What this rank makes of a part."""
    if part == "tail":
        return {"bf16": time_tail(model, device)}
    if model != "tiny":
        return {"bf16": time_cases(part, model, device)}
    return {name: run_rounds(part, dtype, device, rounds) for name, dtype in DTYPES.items()}
