"""What a rank does in each part of `ranks.py`: rounds of rollouts with optimizer steps between them, or timed cases."""

from __future__ import annotations

import tempfile
import time
import warnings
from itertools import pairwise
from typing import Any

import torch
from common import build, median, milliseconds, prompts_of
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
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
STD = 0.2
"""Deviation of the tiny model's weights: large, so that its two most likely tokens are seldom within rounding."""
PARTS = ("tp", "dp", "fsdp", "fsdp_layers")
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


def shard(model: PreTrainedModel) -> PreTrainedModel:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


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
            parameter.sub_(parameter.grad, alpha=0.05)
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
    own = 0 if part == "tp" else rank
    return prompts_of([4 + (7 * index + 3 * own) % 40 for index in range(8 + own % 3)], vocab_size, seed=1 + own)


def engine_for(model: Any, gather: bool | str = "auto") -> RolloutEngine:
    return RolloutEngine(model, config=RolloutConfig(max_slots=16, max_length=128, gather_weights=gather))


def expected(part: str, dtype: torch.dtype, device: str, rounds: int, ranks: int) -> list[list[list[list[int]]]]:
    """Tokens `[round][rank][prompt]` of one model that is not sharded."""
    model = make("tiny", dtype, device)
    engine = engine_for(model)
    vocab_size, seen = model.config.vocab_size, []
    given = batches(vocab_size, 1 if part == "tp" else ranks, device)
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
    batch = batches(vocab_size, 1 if part == "tp" else ranks, device)[0 if part == "tp" else rank]
    engine = engine_for(model, gather=part != "fsdp_layers")
    prompts, same, captures, times = requests(part, rank, vocab_size), [], [], []
    new = [before != after for before, after in pairwise(rows[rank] for rows in wanted[0])]
    for index in range(rounds):
        if index:
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
    if part == "tp":
        if rank == ranks - 1:
            projection = model.model.layers[1].mlp.down_proj
            projection.weight = torch.nn.Parameter(projection.weight.detach().clone())
        tokens_of(engine, prompts, 24)
        result["captures after a move on the last rank"] = engine.captures
        result["recapture reasons"] = engine.recapture_reasons
    engine.shutdown()
    result["bytes after shutdown"] = engine.memory().total
    return result


def time_cases(part: str, name: str, device: str) -> dict[str, Any]:
    """Wall times of the cases on a large model in bf16."""
    rank = dist.get_rank()
    model = make(name, torch.bfloat16, device)
    model = divide(model) if part == "tp" else shard(model) if part.startswith("fsdp") else model
    config = RolloutConfig(max_slots=32, max_length=640, compile=False, gather_weights=part != "fsdp_layers")
    engine = RolloutEngine(model, config=config)
    result: dict[str, Any] = {}
    for case, lengths in CASES.items():
        prompts = prompts_of(lengths, model.config.vocab_size, seed=1 if part == "tp" else 1 + rank)
        times = milliseconds(lambda prompts=prompts: tokens_of(engine, prompts, 128), repeats=3)
        result[case] = {"ms": median(times), "all ms": [round(each, 1) for each in times]}
    result["captures"] = engine.captures
    result["GiB reserved"] = round(torch.cuda.memory_reserved() / 2**30, 1) if device != "cpu" else None
    engine.shutdown()
    return result


def run_part(part: str, model: str, rounds: int, device: str) -> dict[str, Any]:
    """What this rank makes of a part."""
    if model != "tiny":
        return {"bf16": time_cases(part, model, device)}
    return {name: run_rounds(part, dtype, device, rounds) for name, dtype in DTYPES.items()}
