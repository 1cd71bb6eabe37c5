"""How near the engine's log-probabilities are to the trainer's, with one thing changed at a time.

    python benchmarks/parity_bf16.py --model FOLDER [--out FOLDER] [--new-tokens N] [--samples N] [--dtypes bfloat16]
    python benchmarks/parity_bf16.py --geometry 3B [...]

Each way samples at temperature 1 from the same seeds, and is held to forwards over what it sampled: the trainer's over
one sequence at a time and over all in one padded batch, and one with the same weights in float32. Without a checkpoint
the weights are random, the prompts random tokens, and the logits scaled until the entropy is that of text.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from common import build, prompts_of, report
from real_model import PROMPTS
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from liveroll import RolloutConfig, RolloutEngine
from liveroll.errors import LiverollError
from liveroll.tools.parity import LogprobGap, forced_logprobs, plain_sampling
from liveroll.types import RolloutBatch

Around = Callable[[PreTrainedModel], Any]


@contextmanager
def head_in_float32(model: PreTrainedModel) -> Iterator[None]:
    """The last product in float32, as some trainers compute it."""
    head = model.get_output_embeddings()
    weight = head.weight.detach().float()
    hook = head.register_forward_hook(
        lambda module, inputs, output: torch.nn.functional.linear(inputs[0].float(), weight)
    )
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def tf32(model: PreTrainedModel) -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@contextmanager
def training(model: PreTrainedModel) -> Iterator[None]:
    model.train()
    try:
        yield
    finally:
        model.eval()


def autocast(model: PreTrainedModel) -> Any:
    return torch.autocast(model.device.type, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Way:
    """A way to roll out: settings of the engine, and what surrounds both the rollout and the trainer's forwards."""

    settings: dict[str, Any] = field(default_factory=dict)
    around: Around = nullcontext
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    needs_gpu: bool = False


WAYS = {
    "packed prefill, captured, 32 slots": Way(),
    "equal-width prefill": Way({"prefill_route": "equal_width"}),
    "one prefill a prompt": Way({"prefill_route": "per_prompt"}),
    "ordinary (model.generate)": Way({"prefill_route": "ordinary"}),
    "not captured": Way({"capture": False}),
    "prefill not captured": Way({"prefill_capture": False}),
    "compiled": Way({"compile": True}),
    "fused projections": Way({"fuse": True}),
    "compiled, fused": Way({"compile": True, "fuse": True}),
    "4 slots": Way({"max_slots": 4}),
    "1 slot": Way({"max_slots": 1}),
    "eager attention in the trainer": Way(around=lambda model: attention(model, "eager")),
    "head in float32": Way({"capture": False, "prefill_capture": False}, head_in_float32, ("bfloat16",)),
    "trainer in training mode": Way(around=training),
    "bf16 autocast over float32 weights": Way(around=autocast, dtypes=("float32",)),
    "TF32 products": Way(around=tf32, dtypes=("float32",), needs_gpu=True),
}


class Exact:
    """Log-probabilities by the same weights in float32, one sequence at a time; known ones are not computed again."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[tuple[Any, ...], list[float]] = {}

    def logprobs(self, batch: RolloutBatch) -> torch.Tensor:
        rows = []
        for index, completion in enumerate(batch.completions):
            key = (tuple(completion.prompt_ids), tuple(completion.token_ids))
            if key not in self._known:
                names = ("completions", "input_ids", "attention_mask", "loss_mask")
                one = replace(batch, **{name: getattr(batch, name)[index : index + 1] for name in names})
                self._known[key] = forced_logprobs(self._model, one, 1)[0, : len(key[1])].tolist()
            rows += self._known[key]
        return torch.tensor(rows)


def measure(model: PreTrainedModel, exact: Exact, way: Way, prompts: Any, tokenizer: Any, sampling: Any) -> Any:
    """The gaps of one way, and what the engine did."""
    config = RolloutConfig(sample_padded_vocabulary=True, **{"max_slots": 32, **way.settings})
    engine = RolloutEngine(model, tokenizer, config)
    try:
        with way.around(model):
            batch = engine.generate(prompts, sampling)
            sampled = batch.loss_mask.bool().cpu()
            alone, together = (forced_logprobs(model, batch, rows)[sampled] for rows in (1, len(batch)))
        assert batch.response_logprobs is not None
        ours, truth = batch.response_logprobs.cpu()[sampled], exact.logprobs(batch)
        gaps = {
            "engine, trainer row by row": LogprobGap.of(ours, alone),
            "engine, trainer in one batch": LogprobGap.of(ours, together),
            "trainer, both ways": LogprobGap.of(alone, together),
            "engine, float32": LogprobGap.of(ours, truth),
            "trainer, float32": LogprobGap.of(alone, truth),
        }
        stats = batch.stats
        done = {"captures": stats.captures, "eager": stats.eager_reason, "uncompiled": stats.uncompiled_reason}
        return done | {name: rounded(gap) for name, gap in gaps.items()}
    finally:
        engine.unfuse()
        engine.shutdown()


def rounded(gap: LogprobGap) -> dict[str, float]:
    return {name: value if name == "tokens" else float(f"{value:.3g}") for name, value in asdict(gap).items()}


def tempered(model: PreTrainedModel, prompts: list[list[int]]) -> float:
    """Scale the final norm of a random model until the mean entropy at the prompts' ends is about 3 nats."""
    norm = model.base_model.norm.weight
    ids = torch.tensor([prompt[:4] for prompt in prompts], device=model.device)
    low, high, before = 1.0, 64.0, norm.detach().clone()
    for _ in range(12):
        scale = (low + high) / 2
        with torch.no_grad():
            norm.copy_(before * scale)
            logprobs = model(input_ids=ids, use_cache=False).logits[:, -1].float().log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1).mean().item()
        low, high = (scale, high) if entropy > 3 else (low, scale)
    return scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model")
    source.add_argument("--geometry", choices=["3B", "8B"])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    sampling = plain_sampling(arguments.new_tokens, arguments.samples, seed=0)
    tokenizer, scale = None, None
    prompts: list[Any] = PROMPTS
    if arguments.model is not None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        source_model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
        source_model = source_model.to(arguments.device).eval()
    else:
        source_model = build(arguments.geometry, torch.bfloat16, arguments.device)
        prompts = prompts_of([5, 4, 6, 5, 6, 8, 14, 6, 6, 600], source_model.config.vocab_size)
        scale = tempered(source_model, prompts)
    # All are of the weights that bf16 holds, so that what differs is the arithmetic alone.
    full = copy.deepcopy(source_model).float()
    exact = Exact(full)
    models = {"bfloat16": source_model, "float32": full}
    table: dict[str, dict[str, Any]] = {}
    for dtype in arguments.dtypes:
        table[dtype] = {}
        for name in arguments.ways:
            way = WAYS[name]
            if dtype not in way.dtypes or (way.needs_gpu and arguments.device == "cpu"):
                continue
            try:
                table[dtype][name] = measure(models[dtype], exact, way, prompts, tokenizer, sampling)
            except LiverollError as error:
                table[dtype][name] = {"refused": str(error)}
            print(dtype, "|", name, "|", table[dtype][name], flush=True)
    report(
        f"parity-bf16-{torch.device(arguments.device).type}",
        {
            "model": type(source_model).__name__,
            "weights": "random" if arguments.model is None else "trained",
            "parameters": sum(parameter.numel() for parameter in source_model.parameters()),
            "scale of the final norm": scale,
            "sequences": len(prompts) * arguments.samples,
            "new tokens": arguments.new_tokens,
            "gaps": table,
        },
        arguments.out,
    )


if __name__ == "__main__":
    main()
