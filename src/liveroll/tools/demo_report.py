"""What the demo records, and the files it writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TextIO

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from liveroll.tools.embedded import Problem, reward
from liveroll.types import RolloutBatch

Timing = tuple[int, float]


@dataclass(frozen=True)
class Exam:
    """Greedy answers to held-out problems."""

    paper: tuple[Problem, ...]
    answers: tuple[str, ...]

    @property
    def accuracy(self) -> float:
        """Share of problems with every running total right."""
        solved = [reward(*pair) == 1.0 for pair in zip(self.paper, self.answers, strict=True)]
        return sum(solved) / len(solved)


@dataclass(frozen=True)
class Round:
    """One round: its marks, and what was measured before its gradient steps.

    Attributes:
        number: rounds of training that came before.
        rewards: of the sampled answers to the training problems.
        engine: tokens the engine generated, and its seconds.
        generate: tokens `model.generate` made of the same prompts, and its seconds; None where not measured.
        exam: None where not sat.
        logprob_gap: largest difference between the engine's and the trainer's log-probability of a token.
    """

    number: int
    rewards: Sequence[float]
    engine: Timing
    generate: Timing | None
    exam: Exam | None
    logprob_gap: float

    @property
    def mean_reward(self) -> float:
        """Mean reward of the round's answers."""
        return sum(self.rewards) / len(self.rewards)

    @property
    def solved(self) -> float:
        """Share of the round's answers that are right throughout."""
        return sum(mark == 1.0 for mark in self.rewards) / len(self.rewards)


@dataclass(frozen=True)
class DemoResult:
    """What a run of the demo came to.

    Attributes:
        start_accuracy: share of held-out problems solved greedily before training.
        end_accuracy: the same problems after it.
        engine_speed: tokens per second of the engine, over the rounds in which `generate` was timed too.
        generate_speed: tokens per second of `model.generate` on the same prompts with the same settings.
        logprob_gap: largest difference between the engine's and the trainer's log-probability of a token.
        seconds: wall time of the run.
    """

    start_accuracy: float
    end_accuracy: float
    engine_speed: float
    generate_speed: float
    logprob_gap: float
    seconds: float

    @classmethod
    def of(cls, history: Sequence[Round], final: Exam, seconds: float) -> Self:
        """Sum up a run."""
        exams = [round_.exam for round_ in history if round_.exam is not None]
        timed = [(round_.engine, round_.generate) for round_ in history if round_.generate is not None]
        return cls(
            start_accuracy=exams[0].accuracy,
            end_accuracy=final.accuracy,
            engine_speed=speed([engine for engine, _ in timed]),
            generate_speed=speed([generate for _, generate in timed]),
            logprob_gap=max(round_.logprob_gap for round_ in history),
            seconds=seconds,
        )

    def sentence(self) -> str:
        """The run in plain words."""
        points = 100 * (self.end_accuracy - self.start_accuracy)
        return (
            f"Held-out accuracy went from {self.start_accuracy:.1%} to {self.end_accuracy:.1%} ({points:+.1f} points) "
            f"in {self.seconds:.0f} seconds; the engine made {self.engine_speed:,.0f} tokens per second, "
            f"model.generate {self.generate_speed:,.0f} on the same prompts."
        )


def speed(timings: Sequence[Timing]) -> float:
    """Tokens per second over several timings."""
    return sum(tokens for tokens, _ in timings) / sum(seconds for _, seconds in timings)


def write_rollouts(
    file: TextIO, number: int, lesson: Sequence[Problem], batch: RolloutBatch, rewards: Sequence[float]
) -> None:
    """Write a JSON line for each answer of a round; `logprob` is the sum over its tokens."""
    for answer, mark in zip(batch.completions, rewards, strict=True):
        line = {
            "round": number,
            "prompt": lesson[answer.prompt_index].prompt,
            "response": answer.text,
            "reward": mark,
            "logprob": sum(answer.logprobs or ()),
            "finish_reason": answer.finish_reason,
        }
        file.write(json.dumps(line) + "\n")


def draw_curve(path: Path, history: Sequence[Round], final: Exam) -> None:
    """Draw reward and accuracy over the rounds into a PNG file."""
    exams = [(round_.number, round_.exam.accuracy) for round_ in history if round_.exam is not None]
    exams.append((len(history), final.accuracy))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    numbers = [round_.number for round_ in history]
    axes.plot(numbers, [round_.mean_reward for round_ in history], label="reward, sampled, training problems")
    axes.plot(numbers, [round_.solved for round_ in history], label="solved, sampled, training problems")
    axes.plot(*zip(*exams, strict=True), marker="o", label="solved, greedy, held-out problems")
    axes.set(xlabel="round", ylim=(0, 1), title="Learning to carry")
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
