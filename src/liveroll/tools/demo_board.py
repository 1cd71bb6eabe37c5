"""The demo's live table."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from liveroll.tools.demo_report import DemoResult, Exam, Round, speed
from liveroll.tools.embedded import reward

ROWS = 10  # newest rounds on the live board
SHOWN = 4  # held-out problems whose answers are shown

NOTE = """\
reward, solved: sampled answers to training problems. exam: greedy, held out.
engine, generate: tokens per second of both with the same weights, on the same
prompts, sampling as many answers of the same distribution.
Largest difference between the engine's and the trainer's logprobs: {gap:.1e}
"""


class Board:
    """Shows the newest rounds while the demo runs, and the measured ones when it has ended.

    Where the output is no terminal, and nothing can be redrawn, every round is a line.

    Args:
        rounds: how many there will be.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.console = Console()
        self.live = Live(console=self.console, auto_refresh=False)

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def show(self, history: Sequence[Round]) -> None:
        """Show the newest rounds and the newest answers to the exam."""
        newest = history[-1]
        title = f"round {newest.number + 1} of {self.rounds}"
        if not self.console.is_terminal:
            tokens_per_second = f"{speed([newest.engine]):,.0f} tokens per second"
            self.console.print(f"{title}: reward {newest.mean_reward:.3f}, {tokens_per_second}", highlight=False)
        exam = [round_.exam for round_ in history if round_.exam is not None][-1]
        self.live.update(Group(_rounds_table(title, history[-ROWS:]), _answers_table({"answer": exam})), refresh=True)

    def conclude(self, history: Sequence[Round], final: Exam, result: DemoResult) -> None:
        """Show the measured rounds, and the answers to the exam before and after."""
        first = next(round_.exam for round_ in history if round_.exam is not None)
        self.live.update(
            Group(
                _rounds_table("measured rounds", [round_ for round_ in history if round_.exam is not None]),
                _answers_table({"before": first, "after": final}),
                Text(NOTE.format(gap=result.logprob_gap)),
            ),
            refresh=True,
        )


def _rounds_table(title: str, history: Sequence[Round]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("round", "reward", "solved", "exam", "engine tok/s", "generate tok/s"):
        table.add_column(heading, justify="right")
    for round_ in history:
        table.add_row(
            str(round_.number + 1),
            f"{round_.mean_reward:.3f}",
            f"{round_.solved:.1%}",
            f"{round_.exam.accuracy:.1%}" if round_.exam else "",
            f"{speed([round_.engine]):,.0f}",
            f"{speed([round_.generate]):,.0f}" if round_.generate else "",
        )
    return table


def _answers_table(exams: dict[str, Exam]) -> Table:
    table = Table("problem", *exams)
    paper = next(iter(exams.values())).paper
    for index, problem in enumerate(paper[:SHOWN]):
        answers = [exam.answers[index] for exam in exams.values()]
        table.add_row(problem.prompt, *(_marked(answer, reward(problem, answer) == 1.0) for answer in answers))
    return table


def _marked(answer: str, right: bool) -> Text:
    return Text(f"{answer} {'✓' if right else '✗'}", style="green" if right else "red")
