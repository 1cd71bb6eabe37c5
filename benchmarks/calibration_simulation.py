"""How good the choices of `auto` are by costs measured in seconds on a noisy host: a simulation of devices.

    python benchmarks/calibration_simulation.py [--seeds N]    # a minute on one core

The cells, their order, the fit and the plans are those of calibration itself; only the times are made up. A forward
launched by the host takes the longer of two times: that of its launches and that of its work. What the host does takes
longer or shorter for seconds on end, and single calls are disturbed; the first call of a shape takes several times as
long, and setting it up takes seconds that calibration has not. For each device the built-in workloads are planned with
the costs that come of it, and their true times compared to those of the best route. Beside it stands what comes of the
corners of the range alone, and of calls that are timed once. Prints and keeps one JSON.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from common import report

from liveroll import ModelGeometry
from liveroll.config import Route
from liveroll.planning.costs import CostModel
from liveroll.planning.fit import fit_costs
from liveroll.planning.ladder import rung_for, token_ladder
from liveroll.planning.prefill import Forward
from liveroll.planning.routes import ROUTES, Room, plan_routes
from liveroll.tools.grid import Cell, WorkloadRange, plan_grid
from liveroll.tools.measure import Sample, take_samples
from liveroll.tools.readings import read_off
from liveroll.tools.workloads import SEED_WORKLOADS

GEOMETRY = ModelGeometry(layers=36, query_heads=16, kv_heads=2, head_dim=128, element_bytes=2)
RANGE = WorkloadRange(min_length=16, max_length=512, max_batch=32)
BUDGETS = (2, 16, 128)
SECONDS = 12.0
MAX_TOKENS = 65536
CAPTURED_TOKENS = 2048
AROUND_MS = 2.0
DRIFT_SECONDS = 8.0
RUNGS = token_ladder(CAPTURED_TOKENS)


@dataclass(frozen=True)
class Device:
    """What calls take, in ms: of the host `launch`, `mask`, `step` and `ordinary_step`, of the device the rest.

    `mask` is what launching takes longer where there is padding. `drift` is how far the host's speed wanders, as the
    deviation of a logarithm, `disturbed` the share of what it does that takes longer by half on average; `setup` is
    seconds that a shape takes before its first call.
    """

    launch: float
    work: float
    token: float
    step: float
    ordinary_step: float
    captured: bool
    mask: float = 4.0
    drift: float = 0.3
    disturbed: float = 0.08
    setup: float = 1.0

    def forward(self, route: Route, tokens: int, padded: bool, host: float = 1.0) -> float:
        """A prefill forward; `host` is how slow the host is."""
        work = self.work + self.token * tokens
        if route == "packed" and self.captured and tokens <= CAPTURED_TOKENS:
            return self.work + self.token * rung_for(tokens, RUNGS)
        overhead = self.launch / 4 if route == "ordinary" else 0.0
        launch = self.launch + (self.mask if padded else 0.0)
        return overhead * host + max(launch * host, work)

    def decode(self, route: Route, host: float = 1.0) -> float:
        """A decode step."""
        if route == "ordinary":
            return self.ordinary_step * host
        return self.work + self.step if self.captured else self.step * host

    def call(self, route: Route, forwards: Sequence[Forward], lengths: Sequence[int], budget: int) -> float:
        """A whole call on a host of usual speed."""
        total = (budget - 1) * self.decode(route)
        for forward in forwards:
            used = sum(lengths[index] for index in forward.indices)
            tokens = used if forward.width is None else len(forward.indices) * forward.width
            total += self.forward(route, tokens, tokens > used)
        return total


EAGER = Device(launch=32.0, work=2.2, token=0.0119, step=28.0, ordinary_step=32.0, captured=False)
CAPTURED = replace(EAGER, captured=True, step=3.5)
DEVICES = {
    "3B captured": CAPTURED,
    "3B captured, quiet host": replace(CAPTURED, drift=0.05, disturbed=0.02),
    "3B eager": EAGER,
    "3B eager, quiet host": replace(EAGER, drift=0.05, disturbed=0.02),
    "8B captured": replace(CAPTURED, work=4.5, token=0.026),
    "slow device": replace(EAGER, work=10.0, token=0.08, drift=0.1, disturbed=0.03, setup=0.3),
}
"""The first as the 3B geometry on an H200 with a busy host."""


@dataclass
class SimulatedStopwatch:
    """Times cells of a device that is only computed, on a clock of its own."""

    device: Device
    draw: random.Random
    now: float = 0.0
    _speed: float = 0.0
    _then: float = -math.inf
    _seen: set[tuple[Route, int]] = field(default_factory=set)

    def time(self, cell: Cell, repeat: int = 0) -> Sample:
        """As `Stopwatch.time`."""
        tokens, first = cell.rows * cell.width, 1.0
        if (cell.route, tokens) not in self._seen:
            self._seen.add((cell.route, tokens))
            self.now += self.draw.expovariate(1.0) * self.device.setup
            first += self.draw.expovariate(1.0)
        padded = tokens > sum(cell.lengths)
        prefill = self.device.forward(cell.route, tokens, padded, self._host()) * first * self.draw.uniform(1.0, 1.04)
        decode = sum(self.device.decode(cell.route, self._host()) for _ in range(cell.steps))
        wall = prefill + decode + AROUND_MS * self._host()
        self.now += wall / 1e3
        return Sample(cell, repeat, wall, prefill, decode)

    def _host(self) -> float:
        """How slow the host is now, 1 at the median."""
        kept = math.exp((self._then - self.now) / DRIFT_SECONDS)
        self._speed = kept * self._speed + math.sqrt(1.0 - kept * kept) * self.draw.gauss(0.0, 1.0)
        self._then = self.now
        slow = math.exp(self.device.drift * self._speed + 0.08 * self.draw.gauss(0.0, 1.0))
        return slow * (1.0 + self.draw.expovariate(2.0) if self.draw.random() < self.device.disturbed else 1.0)


def measure(device: Device, seed: int, policy: str) -> tuple[CostModel, int]:
    """The costs found, and how many calls they are fitted to."""
    watch = SimulatedStopwatch(device, random.Random(seed))
    cells = plan_grid(RANGE, MAX_TOKENS)
    if policy == "corners alone":
        cells = tuple(cell for cell in cells if cell.needed and cell.width in (RANGE.min_length, RANGE.max_length))

    def seconds_left() -> float:
        return SECONDS - watch.now

    repeats = 1 if policy == "once" else 5
    samples = take_samples(watch, cells, repeats, {}, lambda sample: None, seconds_left)  # type: ignore[arg-type]
    return fit_costs(read_off(samples), GEOMETRY, MAX_TOKENS), len(samples)


def regrets(device: Device, costs: CostModel, allowed: Sequence[Route]) -> list[float]:
    """By what share the route taken is slower than the best one that may be, for each workload and budget."""
    found = []
    for workload in SEED_WORKLOADS:
        lengths = workload.lengths
        for budget in BUDGETS:
            plan = plan_routes(
                lengths,
                [budget] * len(lengths),
                runs=range(len(lengths)),
                rows=len(lengths),
                configured="auto",
                allowed=allowed,
                room=Room(slots=128, row_limits={}, kv_tokens=None),
                costs=costs,
                geometry=GEOMETRY,
            )
            candidates = [candidate for candidate in plan.candidates if candidate.route in allowed]
            times = {c.route: device.call(c.route, c.forwards, lengths, budget) for c in candidates}
            found.append(times[plan.route] / min(times.values()) - 1.0)
    return found


def simulate(device: Device, seeds: int) -> dict[str, Any]:
    """Regrets over some draws of a host's noise."""
    result: dict[str, Any] = {}
    for name in ("calibration", "corners alone", "once"):
        measured = [measure(device, seed, name) for seed in range(seeds)]
        result[name] = {"calls": round(statistics.mean(calls for _, calls in measured), 1)}
        for routes, allowed in (("auto", ROUTES), ("without packed", [route for route in ROUTES if route != "packed"])):
            found = [regret for costs, _ in measured for regret in regrets(device, costs, allowed)]
            over = sum(regret > 0.05 for regret in found) / len(found)
            numbers = {"mean": statistics.mean(found), "over 5%": over, "worst": max(found)}
            result[name][routes] = {key: round(value, 4) for key, value in numbers.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50)
    arguments = parser.parse_args()
    devices = {}
    for name, device in DEVICES.items():
        devices[name] = simulate(device, arguments.seeds)
        print(name, devices[name], flush=True)
    report("calibration-simulation", {"seeds": arguments.seeds, "regrets": devices})


if __name__ == "__main__":
    main()
