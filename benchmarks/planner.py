"""How long planning takes, on one core and without a model.

    python benchmarks/planner.py [--out FOLDER]

`buckets` is the bucket programme, `admission` the choice for a refill, `call` the comparison of all routes that a call
begins with. Lengths are all different, all equal, or drawn as chat prompts are; costs are the defaults. With 65536
tokens each, every bucket but those of one prompt is over the token limit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from common import GEOMETRIES, median, milliseconds, report

from liveroll import CostModel, ModelGeometry, plan_buckets
from liveroll.planning.prefill import PrefillPlanner
from liveroll.planning.routes import PAGED_ROUTES, ROUTES, Room, plan_routes

COUNTS = (32, 128, 256, 1024, 4096)
BOUNDS = {128: 0.48, 256: 1.82, 1024: 20.0, 4096: 200.0}
"""Milliseconds that the bucket programme may take, by the number of prompts."""
SHAPE = GEOMETRIES["3B"]
GEOMETRY = ModelGeometry(
    layers=SHAPE["num_hidden_layers"],
    query_heads=SHAPE["num_attention_heads"],
    kv_heads=SHAPE["num_key_value_heads"],
    head_dim=SHAPE["hidden_size"] // SHAPE["num_attention_heads"],
    element_bytes=2,
)


def lengths_of(kind: str, count: int) -> list[int]:
    """Lengths of so many prompts, in no order."""
    generator = np.random.default_rng(count)
    if kind == "different":
        return generator.permutation(np.arange(count) * 15 + 16).tolist()
    if kind == "65536 each":
        return [65536] * count
    return np.clip(generator.lognormal(5.0, 1.0, count), 1, 4096).astype(int).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    costs = CostModel()
    admissions = PrefillPlanner(PAGED_ROUTES, costs, GEOMETRY)
    room = Room(slots=max(COUNTS), row_limits={}, kv_tokens=None)
    table: dict[str, dict[str, dict[str, float]]] = {}
    for count in COUNTS:
        for kind in ("different", "65536 each", "drawn"):
            lengths = lengths_of(kind, count)
            budgets = [128] * count
            call = {"rows": count, "configured": "auto", "allowed": ROUTES, "room": room}

            def compare(lengths=lengths, budgets=budgets, call=call) -> None:
                plan_routes(lengths, budgets, runs=range(len(lengths)), **call, costs=costs, geometry=GEOMETRY)

            parts = {
                "buckets": lambda lengths=lengths: plan_buckets(lengths, costs, GEOMETRY),
                "admission": lambda lengths=lengths: admissions.plan(lengths),
                "call": compare,
            }
            times = {name: median(milliseconds(run, repeats=25, warm_ups=3)) for name, run in parts.items()}
            table.setdefault(str(count), {})[kind] = times
            print(count, kind, times)
    slowest = {count: max(kinds["buckets"] for kinds in table[str(count)].values()) for count in BOUNDS}
    result = {
        "ms": table,
        "bounds ms": BOUNDS,
        "slowest buckets ms": slowest,
        "within bounds": all(slowest[count] <= bound for count, bound in BOUNDS.items()),
    }
    report("planner", result, arguments.out)


if __name__ == "__main__":
    main()
