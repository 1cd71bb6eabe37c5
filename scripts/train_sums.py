"""Train the embedded model: a character-level Llama that adds well but forgets the carry half of the time.

    OMP_NUM_THREADS=1 python scripts/train_sums.py src/liveroll/assets/sums

Plain supervised training on one CPU core, about four minutes. The seeds are fixed: one machine and one version of
PyTorch give the same file each time. The lessons are flawed on purpose, so the model can do every sum and often does
not: `liveroll demo` has something to teach it that reinforcement learning can find.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from liveroll.tools.embedded import Problem, problems

SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
CHARACTERS = "0123456789+=,"
PAD, BOS, EOS = 0, 1, 2
FORGET = 0.5
WARM_UP = 30

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(SPECIAL) + len(CHARACTERS),
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def build_tokenizer() -> Tokenizer:
    """Build a tokenizer with one token for each character and `<bos>` before every text."""
    words = [*SPECIAL.values(), *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    return tokenizer


def flawed_solution(problem: Problem, rng: random.Random, forget: float) -> str:
    """Write out the running totals, forgetting each carry with probability `forget` and going on from there."""
    total, written = problem.terms[0], []
    for term in problem.terms[1:]:
        carries = total % 10 + term >= 10
        total += term - 10 if carries and rng.random() < forget else term
        written.append(str(total))
    return ",".join(written)


def batch_of(
    tokenizer: PreTrainedTokenizerFast, lesson: Sequence[Problem], solutions: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Make a right-padded `[B, T]` batch with labels on the solution and its end token only."""
    texts = [p.prompt + text + SPECIAL["eos_token"] for p, text in zip(lesson, solutions, strict=True)]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for row, problem in zip(labels, lesson, strict=True):
        row[: 1 + len(problem.prompt)] = -100
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return the share of solutions the model writes greedily, and the probability that it samples one."""
    labels = batch["labels"][:, 1:]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    greedy = ((logits.argmax(-1) == labels) | (labels == -100)).all(dim=1).float().mean()
    sampled = (-F.cross_entropy(logits.mT, labels, reduction="none").sum(dim=1)).exp().mean()
    return greedy.item(), sampled.item()


def make_optimizers(model: LlamaForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, which learns this task in a third of AdamW's steps; AdamW elsewhere."""
    inside = {id(p): p for p in model.model.layers.parameters() if p.ndim == 2}
    outside = [p for p in model.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(inside.values(), lr=learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outside, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def train(tokenizer: PreTrainedTokenizerFast, steps: int, batch_size: int, learning_rate: float) -> LlamaForCausalLM:
    """Train from scratch: a short warm-up, then a linear decay of the learning rate to zero."""
    torch.manual_seed(0)
    rng = random.Random(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    optimizers = make_optimizers(model, learning_rate)
    exam = problems(seed=0, count=512, held_out=True)
    marked = batch_of(tokenizer, exam, [problem.solution for problem in exam])
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate * min((step + 1) / WARM_UP, 1 - step / steps)
            optimizer.zero_grad()
        lesson = problems(seed=1 + step, count=batch_size)
        loss = model(**batch_of(tokenizer, lesson, [flawed_solution(p, rng, FORGET) for p in lesson])).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if (step + 1) % 50 == 0:
            greedy, sampled = accuracy(model, marked)
            print(f"step {step + 1}  loss {loss.item():.3f}  held out: greedy {greedy:.1%}, sampled {sampled:.1%}")
    return model


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint; the small files by hand, in the form that transformers 4.57 and 5.x both read."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **SPECIAL,
        "model_max_length": CONFIG["max_position_embeddings"],
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    generation_config = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    written = {
        "config.json": CONFIG,
        "generation_config.json": generation_config,
        "tokenizer_config.json": tokenizer_config,
    }
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Train the model and save it in the folder given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    save(train(wrapped, options.steps, options.batch_size, options.learning_rate), tokenizer, options.folder)


if __name__ == "__main__":
    main()
