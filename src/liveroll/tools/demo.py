"""The demo: teach the embedded model to carry, with GRPO on rollouts of the very model that is being trained."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from liveroll.config import RolloutConfig
from liveroll.engine import RolloutEngine
from liveroll.sampling_config import SamplingConfig
from liveroll.tools.demo_board import Board
from liveroll.tools.demo_report import DemoResult, Exam, Round, draw_curve, write_rollouts
from liveroll.tools.embedded import Problem, load_embedded, problems, reward
from liveroll.tools.generate_speed import time_generate
from liveroll.tools.grpo_trainer import GRPOTrainer
from liveroll.tools.outputs import make_folder
from liveroll.types import RolloutBatch

PROMPTS = 32  # problems in a round
ANSWERS = 8  # answers to each: the group that an answer is compared with
SLOTS = 128  # rows that decode side by side; half of a round's answers wait for a free one
MAX_NEW_TOKENS = 24  # the longest solution has 21
EXAM_PROBLEMS = 256
EXAM_EVERY = 5  # rounds from one exam, and one timing of `model.generate`, to the next


def run_demo(out: Path, rounds: int = 40, seed: int = 0) -> DemoResult:
    """Train the embedded model on a CPU and print how it goes.

    A round draws problems, lets the model answer each of them several times, marks the answers and takes a few
    gradient steps. Writes `rollouts.jsonl`, a line for each answer, and `curve.png` into `out`.

    Args:
        out: folder to write to; made if missing.
        rounds: training rounds.
        seed: the same seed draws the same problems and, on one machine, the same answers.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    started = time.perf_counter()
    make_folder(out)
    model, tokenizer = load_embedded()
    model.train()
    trainer = GRPOTrainer(model, seed=seed)
    exam_paper = problems(seed, EXAM_PROBLEMS, held_out=True)
    history: list[Round] = []

    with (
        one_thread(),
        RolloutEngine(model, tokenizer, RolloutConfig(max_slots=SLOTS)) as engine,
        (out / "rollouts.jsonl").open("w", encoding="utf-8") as rollouts,
        Board(rounds) as board,
    ):
        for number in range(rounds):
            draw = seed * 1_000_000 + number
            lesson = problems(draw, PROMPTS)
            prompts = [problem.prompt for problem in lesson]
            batch = engine.generate(prompts, sampled_answers(draw))
            rewards = mark(lesson, batch)

            measured = number % EXAM_EVERY == 0
            history.append(
                Round(
                    number=number,
                    rewards=rewards,
                    engine=(batch.stats.new_tokens, batch.stats.seconds),
                    generate=time_generate(model, tokenizer, prompts, ANSWERS, MAX_NEW_TOKENS) if measured else None,
                    exam=sit_exam(engine, exam_paper) if measured else None,
                    logprob_gap=trainer.learn(batch, torch.tensor(rewards), ANSWERS),
                )
            )
            write_rollouts(rollouts, number, lesson, batch, rewards)
            board.show(history)
        final = sit_exam(engine, exam_paper)
        result = DemoResult.of(history, final, time.perf_counter() - started)
        board.conclude(history, final, result)

    draw_curve(out / "curve.png", history, final)
    print(f"{result.sentence()} Every answer is in {out / 'rollouts.jsonl'}, the curve in {out / 'curve.png'}.")
    return result


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: on matrices this small, threads cost more in waiting for each other than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def sampled_answers(seed: int) -> SamplingConfig:
    """The settings of a training rollout: the model's own distribution, nothing filtered."""
    return SamplingConfig(max_new_tokens=MAX_NEW_TOKENS, n=ANSWERS, temperature=1.0, top_k=0, top_p=1.0, seed=seed)


def mark(lesson: Sequence[Problem], batch: RolloutBatch) -> list[float]:
    """Give every answer of a rollout its reward, in the order of the rows."""
    return [reward(lesson[answer.prompt_index], answer.text or "") for answer in batch.completions]


def sit_exam(engine: RolloutEngine, paper: Sequence[Problem]) -> Exam:
    """Answer held-out problems greedily."""
    prompts = [problem.prompt for problem in paper]
    batch = engine.generate(prompts, SamplingConfig(max_new_tokens=MAX_NEW_TOKENS, temperature=0.0))
    answers = tuple(answer.text or "" for answer in batch.completions)
    return Exam(tuple(paper), answers)
