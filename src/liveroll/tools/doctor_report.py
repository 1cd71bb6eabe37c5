"""A diagnosis of `liveroll doctor`, as JSON and as tables."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from rich.console import Console
from rich.table import Table

from liveroll.tools.doctor import Diagnosis

_MEASURES = ("mean", "p99", "max", "kl", "outside")


def describe_diagnosis(diagnosis: Diagnosis) -> dict[str, Any]:
    """A diagnosis as plain values, for JSON, which has no infinity and no NaN."""
    described: dict[str, Any] = {"environment": diagnosis.environment, "healthy": diagnosis.healthy}
    if diagnosis.model:
        described["model"] = diagnosis.model
    if diagnosis.parity is not None:
        parity = diagnosis.parity
        described["parity"] = {
            "sequences": parity.sequences,
            "tokens": parity.alone.tokens,
            "gaps": {
                name: {key: value if isfinite(value) else None for key, value in asdict(gap).items()}
                for name, gap in parity.gaps.items()
            },
            "enough": parity.enough if isfinite(parity.enough) else None,
            "near": parity.near,
            "verdict": parity.verdict,
        }
    return described


def show_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis as tables and a sentence."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in (diagnosis.environment | diagnosis.model).items():
        table.add_row(name, value)
    console.print(table, markup=False, highlight=False)
    if diagnosis.parity is None:
        return
    parity = diagnosis.parity
    gaps = Table(box=None, padding=(0, 2, 0, 0))
    gaps.add_column("log-probabilities of", no_wrap=True)
    for name in ("mean |d|", "p99", "max", "KL (k3)", "off 10%"):
        gaps.add_column(name, justify="right", no_wrap=True)
    for name, gap in parity.gaps.items():
        *numbers, share = (getattr(gap, measure) for measure in _MEASURES)
        gaps.add_row(name, *(f"{number:.1e}" for number in numbers), f"{share:.2%}")
    console.print()
    console.print(gaps)
    console.print(f"{parity.alone.tokens} tokens of {parity.sequences} sequences, sampled at temperature 1")
    console.print(parity.verdict, style="bold" if parity.near else "bold red", highlight=False, soft_wrap=True)
