"""A sweep as one page, its charts in it and beside it."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from liveroll.tools.outputs import check_output, writing
from liveroll.tools.sweep_charts import describe_lengths, draw_buckets, draw_costs, draw_times
from liveroll.tools.sweep_result import AUTO, AUTO_PADDED, CONTENDERS, MARKS, TOLERANCE, Case, SweepResult

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
p.of { color: #555; margin-top: -.6rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; margin: .4rem 0 1rem; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: bottom; }
th:first-child, td:first-child, .text { text-align: left; } .wide td { white-space: nowrap; }
tr.best td { font-weight: 600; } td.far { background: #fbe3d6; }
img { max-width: 100%; height: auto; } .wide { overflow-x: auto; }
"""


_FAR = ' class="far"'
_RATIO = 4  # the column of ratios in the table of a case


def write_report(sweep: SweepResult, out: Path) -> list[Path]:
    """Write the page and its charts.

    Args:
        sweep: what to show.
        out: the page, an HTML file; the charts go beside it as PNG files.

    Returns:
        The files written, the page first.

    Raises:
        ConfigError: the page, or a chart, cannot be written to.
    """
    check_output(out)
    images = {name: _png(figure) for name, figure in _charts(sweep).items()}
    with writing(out):
        out.write_text(_page(sweep, images), "utf-8", "backslashreplace")  # names may hold half a pair
    written = [out]
    for name, image in images.items():
        path = out.with_name(f"{out.stem}-{name}.png")
        with writing(path):
            path.write_bytes(image)
        written.append(path)
    return written


def _charts(sweep: SweepResult) -> dict[str, Figure]:
    budgets = sorted({case.new_tokens for case in sweep.cases})
    charts = {f"times-{budget}": draw_times(_at(sweep, budget)) for budget in budgets}
    return {**charts, "costs": draw_costs(sweep), "buckets": draw_buckets(_at(sweep, budgets[0]))}


def _at(sweep: SweepResult, budget: int) -> list[Case]:
    return [case for case in sweep.cases if case.new_tokens == budget]


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        # The page names the workloads as well, in the fonts of its reader.
        warnings.filterwarnings("ignore", r"Glyph .* missing from font", UserWarning)
        figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def _page(sweep: SweepResult, images: dict[str, bytes]) -> str:
    pictures = {name: _picture(name, image) for name, image in images.items()}
    times = [picture for name, picture in pictures.items() if name.startswith("times-")]
    body = [
        "<h1>Routes compared</h1>",
        f'<p class="of">{escape(_subject(sweep))}</p>',
        _verdict(sweep),
        "<h2>Times</h2>",
        *times,
        "<h2>Every case</h2>",
        f"<p>{escape(MARKS)}. Noise is by how much calls of the same work differed.</p>",
        *map(_case_table, sweep.cases),
        "<h2>Estimated and measured</h2>",
        "<p>An estimate counts the forwards and steps of a call, and nothing of what surrounds them.</p>",
        pictures["costs"],
        "<h2>Buckets</h2>",
        pictures["buckets"],
        "<h2>Costs and their origin</h2>",
        _table(("coefficient", "value"), ((name, _number(value)) for name, value in sweep.coefficients.items())),
        _table(("measured with", ""), _spelled(sweep.origin), texts=(1,)),
        _table(("setting of the sweep", ""), _spelled(sweep.settings), texts=(1,)),
    ]
    head = f'<meta charset="utf-8"><title>Routes compared</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _subject(sweep: SweepResult) -> str:
    """What was timed, in a line."""
    origin = sweep.origin
    names = ("model_type", "parameters", "dtype", "device")
    if not all(name in origin for name in names) or not isinstance(origin["parameters"], int):
        return "The model is not named."
    return f"{origin['model_type']} of {origin['parameters']:,} parameters, {origin['dtype']}, on {origin['device']}"


def _verdict(sweep: SweepResult) -> str:
    rows = []
    for contender in (AUTO, AUTO_PADDED):
        numbers = sweep.summary()[contender]
        rows.append(
            (
                contender,
                f"{numbers['within 5%']} of {numbers['cases']}",
                f"{numbers['worst ratio']:.3f}",
                numbers["worst case"],
                f"{numbers['worst choice']:.3f}",
                str(numbers["same work as the best"]),
                ", ".join(numbers["routes taken"]),
            )
        )
    heads = (
        "", "within 5% of the best", "worst ratio", "in", "worst choice", "same work as the best", "routes taken",
    )  # fmt: skip
    agreement = sweep.summary()["agreement"]
    checked = "Tokens were not checked."
    if agreement is not None:
        checked = f"Of the tokens checked against those of each prompt alone, every route has {agreement:.2%} at least."
    explained = (
        "A ratio is the least time over that of the fastest manual route that may be taken. The choice is the same "
        "for the route taken, timed as a manual one, so that noise between two runs of one route does not count. Where "
        "auto runs the very same forwards as the fastest route, its ratio is noise."
    )
    return f'<div class="wide">{_table(heads, rows, texts=(3, 6))}</div>' + f"<p>{explained} {checked}</p>"


def _case_table(case: Case) -> str:
    best = case.best()
    rows, classes = [], []
    for name in CONTENDERS:
        result = case.results[name]
        memory = "-" if result.peak_bytes is None else f"{result.peak_bytes / 2**30:.2f}"
        label = f"{name.replace('_', ' ')} ({result.taken})" if name in (AUTO, AUTO_PADDED) else name.replace("_", " ")
        ratio = result.least_ms / case.results[case.best(name)].least_ms
        rows.append(
            (
                label,
                case.label(name),
                f"{result.range_ms[1]:.1f}",
                str(len(result.ms)),
                f"{'=' if name in (AUTO, AUTO_PADDED) and case.is_same_work(name) else ''}{ratio:.3f}",
                f"{result.predicted_ms:.1f}",
                f"{case.tokens_per_second(name):,.0f}",
                memory,
                str(result.prefill_forwards),
                f"{result.prefill_tokens:,}",
                f"{result.padded_tokens:,}",
                "-" if result.agreement is None else f"{result.agreement:.1%}",
                result.same_as.replace("_", " ") or "-",
            )
        )
        far = name in (AUTO, AUTO_PADDED) and ratio > TOLERANCE
        classes.append("best" if name == best else "far" if far else "")
    heads = (
        "route", "least ms", "most ms", "calls", "/\N{NO-BREAK SPACE}best", "estimated ms", "tokens/s", "peak GiB",
        "prefill forwards", "prefill tokens", "of them padding", "tokens equal", "same work as",
    )  # fmt: skip
    title = f"{case.workload}, {describe_lengths(case.lengths)}, {case.new_tokens} new tokens, noise {case.noise:.1%}"
    return f'<h3>{escape(title)}</h3><div class="wide">{_table(heads, rows, classes, texts=(12,))}</div>'


def _table(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    classes: Sequence[str] = (),
    texts: Sequence[int] = (),
) -> str:
    """A table; the first column and those of `texts` begin at the left, all others, of numbers, end at the right."""
    of_place = dict.fromkeys(texts, ' class="text"')
    named = (f"<th{of_place.get(place, '')}>{escape(head)}</th>" for place, head in enumerate(heads))
    parts = ["<table><tr>", *named, "</tr>"]
    for index, row in enumerate(rows):
        kind = classes[index] if classes else ""
        parts.append(f'<tr class="{kind}">' if kind else "<tr>")
        for place, cell in enumerate(row):
            far = kind == "far" and place == _RATIO
            parts.append(f"<td{_FAR if far else of_place.get(place, '')}>{escape(str(cell))}</td>")
        parts.append("</tr>")
    return "".join([*parts, "</table>"])


def _spelled(values: Mapping[str, object]) -> list[tuple[str, str]]:
    """Rows of a table of names and values, an inner mapping's one after another and a list's in one line."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows += [(f"{name}, {inner}", text) for inner, text in _spelled(value)]
        elif isinstance(value, list | tuple):
            rows.append((name, ", ".join(map(str, value))))
        else:
            rows.append((name, "-" if value is None else str(value)))
    return [(name.replace("_", " "), text) for name, text in rows]


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _picture(name: str, image: bytes) -> str:
    return f'<img alt="{escape(name)}" src="data:image/png;base64,{base64.b64encode(image).decode("ascii")}">'
