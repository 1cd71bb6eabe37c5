"""The examples that need nothing but the package, as a user runs them."""

from __future__ import annotations

import runpy
from pathlib import Path
from statistics import mean

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *arguments):
    return runpy.run_path(str(EXAMPLES / name))["main"](list(arguments))


def test_grpo_learns(capsys):
    """Guards against an example whose loss pushes the wrong way, or that captures in every round."""
    rewards = run("grpo_minimal.py", "--rounds", "9", "--seed", "1")
    assert len(rewards) == 9
    assert mean(rewards[-3:]) > mean(rewards[:3])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    # A size of the batch is captured when it is first needed.
    assert int(lines[-1].split()[-2]) < 14


def test_distillation_brings_the_student_to_the_teacher(capsys):
    """Guards against a divergence of the wrong tokens, or from the wrong side."""
    divergences = run("distill.py", "--rounds", "12")
    assert mean(divergences[-3:]) < mean(divergences[:3]) / 2
    assert len(capsys.readouterr().out.splitlines()) == 12


@pytest.mark.parametrize("wrong", [["student"], ["--beta", "2"], ["--beta", "nan"]])
def test_distillation_without_a_teacher_or_a_divergence(wrong, capsys):
    """Guards against a student that is named and passed over for the tiny model, and a traceback for a bad beta."""
    with pytest.raises(SystemExit):
        run("distill.py", "--rounds", "1", *wrong)
    message = capsys.readouterr().err
    assert "a student needs a teacher" in message or "--beta must be from 0 to 1" in message


def test_the_divergence():
    """Guards against a formula that is not the divergence of its name: checked against sums over the vocabulary."""
    divergence = runpy.run_path(str(EXAMPLES / "distill.py"))["divergence"]
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, 5, 7, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    p, q = teacher.softmax(-1), student.softmax(-1)

    def kl(first, second):
        return (first * (first / second).log()).sum(-1)

    for beta in (0.0, 0.3, 1.0):
        mixture = beta * p + (1 - beta) * q
        terms = beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)
        if beta in (0.0, 1.0):
            terms = kl(p, q) if beta == 0.0 else kl(q, p)
        expected = (terms * mask).sum() / mask.sum()
        torch.testing.assert_close(divergence(student, teacher, mask, beta), expected)
    assert divergence(student, student, mask, 0.5).abs() < 1e-12
