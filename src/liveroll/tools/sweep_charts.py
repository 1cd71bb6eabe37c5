"""Charts of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from liveroll.tools.sweep_result import AUTO_PADDED, CONTENDERS, MANUAL, Case, SweepResult

# Okabe and Ito's colours, which people with any kind of colour vision tell apart: https://jfly.uni-koeln.de/color/
BLACK, ORANGE, SKY, GREEN, BLUE, RED = "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00"
GREY, PALE = "#8a8a8a", "#d9d9d9"
_ROUTE_MARKS = {
    "packed": (BLUE, "o"),
    "bucketed": (GREEN, "s"),
    "equal_width": (ORANGE, "^"),
    "per_prompt": (SKY, "D"),
    "ordinary": (RED, "X"),
}
_TIMES = "\N{MULTIPLICATION SIGN}"
_COLUMNS = 3
_NAME = 24  # letters of a workload's name that a panel has room for
_LABELLED = 8  # a workload of more buckets has no room for a label at each


def draw_times(cases: Sequence[Case]) -> Figure:
    """Least time of every contender, a panel for each workload; all cases at one budget."""
    figure, panels = _grid(len(cases), height=2.6)
    places = range(len(CONTENDERS), 0, -1)
    for panel, case in zip(panels, cases, strict=True):
        best = case.best()
        times = [case.results[name].least_ms for name in CONTENDERS]
        colours = [_bar_colour(name, best) for name in CONTENDERS]
        panel.barh(places, times, color=colours, edgecolor=BLACK, linewidth=0.6, height=0.72)
        for place, name, ms in zip(places, CONTENDERS, times, strict=True):
            low, high = case.results[name].range_ms
            panel.plot([low, high], [place, place], color=BLACK, linewidth=1.0)
            panel.annotate(
                f"{'~' if case.results[name].extended_ms else ''}{_ms(ms)}",
                (max(ms, high), place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        panel.set_yticks(places, [name.replace("_", " ") for name in CONTENDERS], fontsize=8)
        panel.set_xlim(0, 1.22 * max(case.results[name].range_ms[1] for name in CONTENDERS))
        panel.xaxis.set_major_locator(MaxNLocator(4))
        _entitle(panel, case, describe_lengths(case.lengths))
        panel.set_xlabel("ms a call", fontsize=8)
        panel.tick_params(axis="x", labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    handles = [
        Patch(facecolor=GREEN, edgecolor=BLACK, label="fastest manual route"),
        Patch(facecolor=PALE, edgecolor=BLACK, label="other manual routes"),
        Patch(facecolor=BLUE, edgecolor=BLACK, label="auto"),
        Patch(facecolor=SKY, edgecolor=BLACK, label="auto without packed"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(
        f"Time of a call, {cases[0].new_tokens} new tokens a prompt (the least; lines to the most; ~ not run)",
        fontsize=11,
    )
    return figure


def draw_costs(sweep: SweepResult) -> Figure:
    """Estimated against measured times: of what the costs were fitted to, and of the sweep's calls."""
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for route, (colour, mark) in _ROUTE_MARKS.items():
        points = [point for point in sweep.points if point["route"] == route]
        for kind, filled in (("prefill", True), ("decode", False)):
            chosen = [point for point in points if point["kind"] == kind]
            left.scatter(
                [point["ms"] for point in chosen],
                [point["predicted_ms"] for point in chosen],
                marker=mark,
                s=34,
                facecolors=colour if filled else "none",
                edgecolors=colour,
                linewidths=1.2,
                label=_point_name(route, kind) if chosen else None,
            )
        results = [case.results[route] for case in sweep.cases]
        right.scatter(
            [result.least_ms for result in results],
            [result.predicted_ms for result in results],
            marker=mark,
            s=34,
            color=colour,
            alpha=0.85,
            label=route.replace("_", " "),
        )
    left.set_title("Calibration: one forward, or one decode step", fontsize=10, loc="left")
    right.set_title("Sweep: whole calls of the manual routes", fontsize=10, loc="left")
    _compare_equal(left, [point[name] for point in sweep.points for name in ("ms", "predicted_ms")])
    calls = [case.results[route] for case in sweep.cases for route in MANUAL]
    _compare_equal(right, [ms for call in calls for ms in (call.least_ms, call.predicted_ms)])
    return figure


def draw_buckets(cases: Sequence[Case]) -> Figure:
    """The buckets of each workload: prompts side by side, what is above their tokens padding."""
    figure, panels = _grid(len(cases), height=2.4)
    for panel, case in zip(panels, cases, strict=True):
        left = 0
        tallest = max(bucket.width for bucket in case.buckets)
        ordered = sorted(case.buckets, key=lambda bucket: bucket.width)
        for bucket in ordered:
            rows = len(bucket.lengths)
            panel.add_patch(
                Rectangle((left, 0), rows, bucket.width, facecolor="white", edgecolor=ORANGE, hatch="////", linewidth=0)
            )
            panel.bar(
                [left + row + 0.5 for row in range(rows)],
                sorted(bucket.lengths),
                width=1.0,
                color=SKY,
                edgecolor="white",
                linewidth=0.3 if rows <= 64 else 0,
            )
            panel.add_patch(Rectangle((left, 0), rows, bucket.width, fill=False, edgecolor=BLACK, linewidth=1.2))
            left += rows
        if len(ordered) <= _LABELLED:
            _label_buckets(panel, [(len(bucket.lengths), bucket.width) for bucket in ordered], left, tallest)
        panel.set_xlim(0, left)
        panel.set_ylim(0, 1.28 * tallest)
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        panel.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        area = sum(bucket.width * len(bucket.lengths) for bucket in ordered)
        waste = 1 - sum(sum(bucket.lengths) for bucket in ordered) / area
        count = f"{len(ordered)} bucket{'s' if len(ordered) > 1 else ''}"
        _entitle(panel, case, f"{count}, {waste:.0%} padding")
        panel.set_xlabel("prompts", fontsize=8)
        panel.set_ylabel("tokens", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    handles = [
        Patch(facecolor=SKY, label="prompt tokens"),
        Patch(facecolor="white", edgecolor=ORANGE, hatch="////", label="padding"),
        Patch(facecolor="white", edgecolor=BLACK, label=f"one forward (prompts {_TIMES} width)"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle("Buckets of the bucketed route", fontsize=11)
    return figure


def describe_lengths(lengths: Sequence[int]) -> str:
    """Lengths in a few words: `1×512 + 31×16`, or how many there are and between what."""
    counts = {length: lengths.count(length) for length in sorted(set(lengths), reverse=True)}
    if len(counts) <= 2:
        return " + ".join(f"{count}{_TIMES}{length}" for length, count in counts.items())
    return f"{len(lengths)} of {min(lengths)} to {max(lengths)}"


def _entitle(panel: Axes, case: Case, what: str) -> None:
    """Name a panel after a workload: as it is written, and no longer than there is room for."""
    name = case.workload
    if len(name) > _NAME:
        name = name[: _NAME - 1].rstrip() + "\N{HORIZONTAL ELLIPSIS}"
    panel.set_title(f"{name}: {what}", fontsize=9, loc="left", parse_math=False)


def _label_buckets(panel: Axes, shapes: Sequence[tuple[int, int]], total: int, tallest: int) -> None:
    """Write rows × width above each bucket, upright where the bucket is too narrow for it."""
    left = 0
    for rows, width in shapes:
        narrow = rows < 0.2 * total
        panel.annotate(
            f"{rows}{_TIMES}{width}",
            (left + rows / 2, width),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            rotation=90 if narrow else 0,
            fontsize=8,
        )
        left += rows
    panel.set_ylim(0, 1.28 * tallest)


def _compare_equal(panel: Axes, values: Sequence[float]) -> None:
    """Logarithmic axes of one range that holds the values, the diagonal, and a tenth to either side of it."""
    panel.set_xscale("log")
    panel.set_yscale("log")
    low, high = min(values, default=1.0) / 1.4, max(values, default=1.0) * 1.4
    ends = [low, high]
    below, above = [0.9 * end for end in ends], [1.1 * end for end in ends]
    panel.fill_between(ends, below, above, color=PALE, linewidth=0, label="within 10%", zorder=-1)
    panel.plot(ends, ends, color=GREY, linewidth=1.0, zorder=0)
    panel.set(xlim=(low, high), ylim=(low, high), xlabel="measured ms", ylabel="estimated ms")
    panel.set_aspect("equal")
    panel.grid(alpha=0.25)
    panel.legend(fontsize=8, loc="upper left")


def _grid(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, three in a row."""
    columns = min(count, _COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(1.2 + 3.9 * columns, 1.2 + height * rows), layout="constrained")
    axes: Any = figure.subplots(rows, columns, squeeze=False)
    panels = list(axes.flat)
    for unused in panels[count:]:
        unused.set_visible(False)
    return figure, panels[:count]


def _bar_colour(name: str, best: str) -> str:
    if name in MANUAL:
        return GREEN if name == best else PALE
    return SKY if name == AUTO_PADDED else BLUE


def _point_name(route: str, kind: str) -> str:
    runs = {"equal_width": "padded", "ordinary": "generate"}.get(route, route)
    if kind == "decode":
        return "decode step, generate" if route == "ordinary" else "decode step, engine"
    return f"prefill, {runs}"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
