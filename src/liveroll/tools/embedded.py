"""The model that ships with the package, and the sums it does badly enough to be worth training."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Any

MIN_TERMS = 2
MAX_TERMS = 8
MAX_TERM = 9
_HELD_OUT_SHARE = 5  # one problem in five is held out


@dataclass(frozen=True)
class Problem:
    """A sum to write out, such as `7+4+9=`, whose model answer is the running totals `11,20`.

    Attributes:
        terms: the numbers to add, two to eight of them, each from 1 to 9.
    """

    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """The text the model continues."""
        return "+".join(map(str, self.terms)) + "="

    @property
    def solution(self) -> str:
        """The running totals, comma-separated; the last is the answer."""
        totals = [sum(self.terms[: end + 1]) for end in range(1, len(self.terms))]
        return ",".join(map(str, totals))

    @property
    def held_out(self) -> bool:
        """Whether the problem is kept from all training: decided by its terms alone, so no split can leak."""
        digest = hashlib.sha256(self.prompt.encode()).digest()
        return digest[0] % _HELD_OUT_SHARE == 0


def problems(seed: int, count: int, *, held_out: bool = False) -> list[Problem]:
    """Draw sums at random, all of them from one side of the train / held-out split.

    Args:
        seed: the same seed gives the same problems.
        count: how many to draw; a problem may be drawn twice.
        held_out: draw from the problems that are never trained on.
    """
    rng = random.Random(seed)
    drawn: list[Problem] = []
    while len(drawn) < count:
        terms = rng.randint(MIN_TERMS, MAX_TERMS)
        problem = Problem(tuple(rng.randint(1, MAX_TERM) for _ in range(terms)))
        if problem.held_out == held_out:
            drawn.append(problem)
    return drawn


def reward(problem: Problem, text: str) -> float:
    """Mark a response: the share of running totals that are right before the first mistake.

    It is 1.0 for the solution and for no other text: a missing total and one too many both count as wrong.
    """
    expected, written = problem.solution.split(","), text.split(",")
    right = 0
    while right < min(len(expected), len(written)) and written[right] == expected[right]:
        right += 1
    return right / max(len(expected), len(written))


def load_embedded() -> tuple[Any, Any]:
    """Load the shipped model and its tokenizer: a character-level Llama of about a million parameters, float32.

    Returns:
        `(model, tokenizer)`, a `LlamaForCausalLM` in eval mode on the CPU and a `PreTrainedTokenizerFast`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with as_file(files("liveroll") / "assets" / "sums") as path:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path)
    return model, tokenizer
