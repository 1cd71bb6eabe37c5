"""On-policy distillation in one file: a student writes, the teacher says what it would have written at each token.

    python examples/distill.py                                   # the tiny model teaches a copy that has forgotten
    python examples/distill.py path/to/student path/to/teacher --cuda

The loss is the generalised Jensen-Shannon divergence of "On-Policy Distillation of Language Models" (arXiv:2306.13649,
equation 1) over the tokens of the student's own responses, as in DeepSpeed's on-policy distillation: beta 0 is the
divergence of the teacher from the student, beta 1 that of the student from the teacher.
"""

from __future__ import annotations

import argparse
import copy
import math

import torch
from torch.nn import functional as F

from liveroll import RolloutBatch, RolloutConfig, RolloutEngine, SamplingConfig
from liveroll.tools.embedded import load_embedded, problems

PROMPTS = 32  # in a round


def load(student: str | None, teacher: str | None, device: str):
    if student is None:
        taught, tokenizer = load_embedded()
        model = copy.deepcopy(taught)
        with torch.no_grad():  # forget a little, for something to learn
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.5 * float(parameter.std()))
        return model.to(device), taught.to(device), tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    models = [AutoModelForCausalLM.from_pretrained(path, device_map=device) for path in (student, teacher)]
    return *models, AutoTokenizer.from_pretrained(student)


def response_logits(model, batch: RolloutBatch) -> torch.Tensor:
    """The logits that each response token was, or would be, drawn from: `[N, R, V]`."""
    positions = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)  # prompts are left-padded
    output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=positions)
    return output.logits[:, batch.response_start_idx - 1 : -1].float()


def divergence(
    student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor, beta: float, temperature: float = 1.0
) -> torch.Tensor:
    """The generalised Jensen-Shannon divergence, as a mean over the tokens where the mask is 1.

    With `M = beta * teacher + (1 - beta) * student` it is `beta * KL(teacher | M) + (1 - beta) * KL(student | M)`; at
    beta 0 and 1, where that vanishes, `KL(teacher | student)` and `KL(student | teacher)`.
    """
    p, q = F.log_softmax(teacher / temperature, -1), F.log_softmax(student / temperature, -1)
    if beta in (0.0, 1.0):
        first, second = (p, q) if beta == 0.0 else (q, p)
        terms = first.exp() * (first - second)
    else:
        mixture = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
        terms = beta * p.exp() * (p - mixture) + (1 - beta) * q.exp() * (q - mixture)
    return (terms.sum(-1) * mask).sum() / mask.sum()


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("student", nargs="?", help="folder of a model; the tiny ones if left out")
    parser.add_argument("teacher", nargs="?", help="folder of a model with the same vocabulary")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cuda", action="store_true", help="train on a GPU")
    options = parser.parse_args(arguments)
    if (options.student is None) != (options.teacher is None):
        parser.error("a student needs a teacher: give two folders, or none")
    if not 0 <= options.beta <= 1:
        parser.error(f"--beta must be from 0 to 1, not {options.beta}")

    torch.manual_seed(options.seed)
    student, teacher, tokenizer = load(options.student, options.teacher, "cuda" if options.cuda else "cpu")
    optimizer = torch.optim.AdamW(student.parameters(), lr=options.learning_rate, weight_decay=0.0)
    sampling = SamplingConfig(max_new_tokens=24, temperature=1.0, top_k=0, top_p=1.0)
    losses = []
    with RolloutEngine(student, tokenizer, RolloutConfig(max_slots=PROMPTS, seed=options.seed)) as engine:
        for number in range(options.rounds):
            lesson = problems(options.seed * 1_000_000 + number, PROMPTS)
            batch = engine.generate([problem.prompt for problem in lesson], sampling)
            student.train()
            with torch.no_grad():
                wanted = response_logits(teacher, batch)
            loss = divergence(response_logits(student, batch), wanted, batch.loss_mask, options.beta)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            print(f"round {number:3d}  divergence {losses[-1]:.4f}  {engine.captures} captures")
    return losses


if __name__ == "__main__":
    main()
