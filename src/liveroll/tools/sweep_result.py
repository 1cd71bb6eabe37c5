"""What a sweep found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

from liveroll.config import Route

MANUAL: tuple[Route, ...] = get_args(Route)
AUTO, AUTO_PADDED = "auto", "auto without packed"
CONTENDERS: tuple[str, ...] = (*MANUAL, AUTO, AUTO_PADDED)
TOLERANCE = 1.05
"""`auto` may take so much of the best route's time."""
MARKS = (
    "~ left out, as its times at smaller budgets show it to be slower: what it would take by them; "
    "* not called, the times are those of the route that does the same work; "
    "= the same work as the best route, so that the ratio is noise"
)
"""What the marks at times and ratios say."""


@dataclass
class RouteResult:
    """What one contender did with a workload.

    Attributes:
        predicted_ms: what the costs say of it, without what surrounds the forwards of a call.
        taken: the route that its first admission took.
        ms: wall times of its calls.
        peak_bytes: most device memory allocated during one, all that is resident included; None on a CPU.
        prefill_forwards: forwards over prompts.
        prefill_tokens: token positions in them.
        padded_tokens: how many of those were padding.
        decode_steps: decode steps.
        agreement: share of the checked tokens that equal the reference's; None where nothing was checked.
        same_as: the first manual route before it that runs the very same forwards, or nothing. Times of the two differ
            by noise alone, and by the comparing that `auto` does.
        borrowed: whether it was not called, since `same_as` was; its times are that one's.
        extended_ms: what it would take by its times at smaller budgets, by which it was left out; None where it was
            not. There are no times of it then.
    """

    predicted_ms: float
    taken: str = ""
    ms: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    prefill_forwards: int = 0
    prefill_tokens: int = 0
    padded_tokens: int = 0
    decode_steps: int = 0
    agreement: float | None = None
    same_as: str = ""
    borrowed: bool = False
    extended_ms: float | None = None

    @property
    def least_ms(self) -> float:
        """Least wall time, as what disturbs a call only adds to it; of one that was left out, what it would take."""
        return self.range_ms[0]

    @property
    def range_ms(self) -> tuple[float, float]:
        """The least and the most of its wall times."""
        ms = self.ms if self.extended_ms is None else [self.extended_ms]
        return min(ms), max(ms)


@dataclass(frozen=True)
class BucketShape:
    """A bucket of the bucketed route: the width, and the lengths of the prompts padded to it."""

    width: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A workload at one budget, run by every contender.

    Attributes:
        workload: its name.
        lengths: tokens of each prompt.
        new_tokens: tokens generated for each.
        buckets: what the bucketed route made of it.
        results: by contender.
    """

    workload: str
    lengths: tuple[int, ...]
    new_tokens: int
    buckets: tuple[BucketShape, ...]
    results: dict[str, RouteResult]

    def best(self, contender: str = AUTO) -> str:
        """The manual route that took least, of those that a contender may take."""
        routes = [route for route in MANUAL if contender != AUTO_PADDED or route != "packed"]
        return min(routes, key=lambda route: self.results[route].least_ms)

    def ratio(self, contender: str = AUTO) -> float:
        """What a contender took, over what the best manual route took."""
        return self.results[contender].least_ms / self.results[self.best(contender)].least_ms

    @property
    def noise(self) -> float:
        """By how much two contenders that ran the same forwards differ, or two calls of the best route, at most."""
        best = self.results[self.best()]
        pairs = [best.range_ms]
        for result in self.results.values():
            other = self.results.get(result.same_as)
            if other is not None and not result.borrowed and result.extended_ms is None and other.extended_ms is None:
                pairs.append((result.least_ms, other.least_ms))
        return max(max(pair) / min(pair) for pair in pairs) - 1

    def choice_ratio(self, contender: str = AUTO) -> float:
        """What the route that a contender chose takes when chosen by hand, over the best: the choice without noise."""
        chosen = self.results[self.results[contender].taken]
        return chosen.least_ms / self.results[self.best(contender)].least_ms

    def label(self, contender: str) -> str:
        """The least time of a contender in ms, marked where it was not called."""
        result = self.results[contender]
        mark = "~" if result.extended_ms is not None else "*" if result.borrowed else ""
        return f"{mark}{result.least_ms:.1f}"

    def is_same_work(self, contender: str = AUTO) -> bool:
        """Whether a contender ran the same forwards as the best manual route, so that its ratio is noise."""
        best = self.best(contender)
        return self.results[contender].same_as in (best, self.results[best].same_as or best)

    def tokens_per_second(self, contender: str) -> float:
        """Tokens generated a second."""
        return len(self.lengths) * self.new_tokens / self.results[contender].least_ms * 1e3


@dataclass(frozen=True)
class SweepResult:
    """A sweep.

    Attributes:
        origin: what its costs are costs of, as in a file of costs.
        coefficients: the costs.
        points: the measurements that they were fitted to.
        settings: how it was run.
        cases: every workload at every budget.
    """

    origin: dict[str, Any]
    coefficients: dict[str, Any]
    points: list[dict[str, Any]]
    settings: dict[str, Any]
    cases: list[Case]

    def worst(self, contender: str = AUTO) -> Case:
        """The case in which a contender was farthest behind the best manual route."""
        return max(self.cases, key=lambda case: case.ratio(contender))

    @property
    def agrees(self) -> bool:
        """Whether all tokens that were checked are as expected."""
        shares = [result.agreement for case in self.cases for result in case.results.values()]
        return all(share is None or share == 1.0 for share in shares)

    def summary(self) -> dict[str, Any]:
        """The sweep in a few numbers."""
        shares = [r.agreement for case in self.cases for r in case.results.values() if r.agreement is not None]
        summary: dict[str, Any] = {"agreement": min(shares, default=None)}
        for contender in (AUTO, AUTO_PADDED):
            worst = self.worst(contender)
            summary[contender] = {
                "worst ratio": round(worst.ratio(contender), 4),
                "worst regression": f"{max(worst.ratio(contender) - 1, 0):.2%}",
                "worst case": f"{worst.workload}, {worst.new_tokens} new tokens",
                "worst choice": round(max(case.choice_ratio(contender) for case in self.cases), 4),
                "within 5%": sum(case.ratio(contender) <= TOLERANCE for case in self.cases),
                "same work as the best": sum(case.is_same_work(contender) for case in self.cases),
                "cases": len(self.cases),
                "routes taken": sorted({case.results[contender].taken for case in self.cases}),
            }
        return summary
