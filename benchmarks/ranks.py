"""Rollouts of one model on several ranks, held to one GPU's: tensor-parallel, data-parallel, and fully sharded.

    python benchmarks/ranks.py [--cpu N] [--rounds 6] [--model tiny|8B] [--parts tp dp fsdp ...] [--out FOLDER]
    torchrun --nproc-per-node N benchmarks/ranks.py [...]

By itself it starts one process for each GPU that it finds, or N that talk through gloo with `--cpu`. Each part is a
group of processes of its own with a limit of time, so that one that fails or hangs takes no other with it; under
torchrun the parts share their processes, and the first that hangs is the last.

`tiny` rounds are rollouts with an optimizer step between them, in fp32 and bf16. Their fp32 tokens must be those of one
rank without sharding, which rank 0 computes beforehand. `tp` also moves a parameter on the last rank, and every part
leaves its process group after `shutdown()`. `8B` only times 32 prompts of 16 tokens, and one of 512 beside 31 of 16,
with 128 new tokens each, in bf16.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import GEOMETRIES, build, median, milliseconds, prompts_of, report
from torch import distributed as dist
from torch import multiprocessing
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


def run_part(part: str, arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """What this rank makes of a part."""
    if arguments.model != "tiny":
        return {"bf16": time_cases(part, arguments.model, device)}
    return {name: run_rounds(part, dtype, device, arguments.rounds) for name, dtype in DTYPES.items()}


def join(rank: int, ranks: int, local: int, address: str, cpu: bool, seconds: float) -> str:
    """Enter the group of all ranks; the device of this one."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(ranks))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    device = "cpu" if cpu else f"cuda:{local}"
    if not cpu:
        torch.cuda.set_device(local)
    dist.init_process_group(
        "gloo" if cpu else "nccl",
        init_method=address,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=seconds),
        device_id=None if cpu else torch.device(device),
    )
    return device


def one_rank(rank: int, ranks: int, port: int, part: str, arguments: argparse.Namespace, results: Any) -> None:
    """A process of a part: report what it saw, then that it left the group."""
    try:
        device = join(rank, ranks, rank, f"tcp://127.0.0.1:{port}", arguments.cpu > 0, arguments.limit)
        results.put((rank, run_part(part, arguments, device)))
        dist.destroy_process_group()
        results.put((rank, "left"))
    except BaseException:
        results.put((rank, {"failure": traceback.format_exc()}))
        raise


def start_part(part: str, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a part in processes of its own, which are stopped at its limit of time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=one_rank, args=(rank, ranks, port, part, arguments, results), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    seen: dict[int, Any] = {}
    left: list[int] = []
    started = time.monotonic()
    while len(left) < ranks and not any("failure" in value for value in seen.values()):
        try:
            rank, value = results.get(timeout=max(0.1, arguments.limit - (time.monotonic() - started)))
        except Exception:
            break
        if value == "left":
            left.append(rank)
        else:
            seen[rank] = value
    for process in processes:
        process.join(5 if len(left) == ranks else 0)
        process.kill()
        process.join()
    return judge(
        part, [seen.get(rank, {"failure": "no report in time"}) for rank in range(ranks)], sorted(left), started
    )


def judge(part: str, seen: list[dict[str, Any]], left: list[int], started: float) -> dict[str, Any]:
    """The part's result, and what is wrong with it."""
    wrong = [f"rank {rank}: {value['failure']}" for rank, value in enumerate(seen) if "failure" in value]
    if len(left) < len(seen):
        wrong.append(f"of {len(seen)} ranks only {left} left the process group after shutdown()")
    for rank, value in enumerate(seen):
        for dtype, rounds in value.items():
            if dtype != "failure" and rounds.get("steps that changed tokens") == 0:
                wrong.append(f"rank {rank}, {dtype}: no optimizer step changed a token")
            if dtype == "fp32" and "same tokens" in rounds and min(rounds["same tokens"]) < 1:
                wrong.append(f"rank {rank}: fp32 tokens differ: {rounds['same tokens']}")
            if isinstance(rounds, dict) and isinstance(rounds["captures"], list):
                once, counts = rounds["captures"][0], rounds["captures"]
                if part in ("tp", "dp") and (counts != [once] * len(counts) or not once):
                    wrong.append(f"rank {rank}, {dtype}: captures {counts}")
                if part == "tp" and rounds["captures after a move on the last rank"] != 2 * once:
                    wrong.append(f"rank {rank}, {dtype}: a move on the last rank was not captured again")
                if rounds["bytes after shutdown"]:
                    wrong.append(f"rank {rank}, {dtype}: {rounds['bytes after shutdown']} bytes after shutdown()")
    return {"seconds": round(time.monotonic() - started, 1), "wrong": wrong, "ranks": seen}


def under_torchrun(arguments: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """All parts in the processes that torchrun started; results on rank 0 only."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = join(rank, ranks, int(os.environ["LOCAL_RANK"]), "env://", arguments.cpu > 0, arguments.limit)
    parts = {}
    for part in arguments.parts:
        started = time.monotonic()
        try:
            own = run_part(part, arguments, device)
        except Exception:
            own = {"failure": traceback.format_exc()}
        seen: list[Any] = [None] * ranks
        dist.all_gather_object(seen, own)
        parts[part] = judge(part, seen, list(range(ranks)), started)
    dist.destroy_process_group()
    return ranks, parts if rank == 0 else {}


def show(parts: dict[str, Any]) -> None:
    print(f"{'part':12} {'dtype':5} {'same tokens':>12} {'captures':>16} {'ms, first and median':>22}  wrong")
    for part, result in parts.items():
        first = result["ranks"][0]
        for dtype, rounds in first.items():
            if dtype == "failure":
                continue
            if "same tokens" in rounds:
                least = min(min(rank[dtype]["same tokens"]) for rank in result["ranks"] if dtype in rank)
                times = f"{rounds['ms'][0]:.0f} {median(rounds['ms'][1:] or rounds['ms']):.1f}"
                print(f"{part:12} {dtype:5} {least:12.4f} {rounds['captures']!s:>16} {times:>22}")
            else:
                for case in CASES:
                    print(f"{part:12} {dtype:5} {case:>29} {rounds[case]['ms']:>22.1f}")
        for line in result["wrong"]:
            print(f"{part:12} WRONG {line}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", type=int, default=0, help="processes on the CPU instead of one for each GPU")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--model", default="tiny", choices=["tiny", *GEOMETRIES])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--limit", type=float, default=120, help="seconds that a part may take")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        ranks, parts = under_torchrun(arguments)
    else:
        ranks = arguments.cpu or torch.cuda.device_count()
        if not ranks:
            parser.error("there is no GPU; give --cpu N")
        parts = {part: start_part(part, ranks, arguments) for part in arguments.parts}
    if not parts:
        return 0
    show(parts)
    name = "-".join(
        ["ranks", *(["cpu"] if arguments.cpu else []), *([arguments.model] if arguments.model != "tiny" else [])]
    )
    report(name, {"ranks": ranks, "rounds": arguments.rounds, "model": arguments.model, "parts": parts}, arguments.out)
    return int(any(result["wrong"] for result in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
