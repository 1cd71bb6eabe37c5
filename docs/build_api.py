"""Write docs/api.md from the docstrings of the public names: `python docs/build_api.py`."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "src" / "liveroll"
SECTIONS = {
    "Engine": ("engine", ("RolloutEngine",)),
    "Configuration": ("config", ("RolloutConfig",)),
    "Sampling": ("sampling_config", ("SamplingConfig",)),
    "Completions": ("completion", ("Completion",)),
    "Requests and results": (
        "types",
        ("RolloutRequest", "RolloutBatch", "RolloutStats", "RolloutFusion", "RolloutMemory", "ResolvedSampling"),
    ),
    "Profiles": ("profile", ("RolloutProfile",)),
    "Costs": ("planning/costs", ("CostModel",)),
    "Geometry": ("planning/geometry", ("ModelGeometry",)),
    "Buckets": ("planning/buckets", ("plan_buckets", "Bucket")),
    "Plans": ("planning/routes", ("RoutePlan", "RouteCandidate")),
    "Errors": (
        "errors",
        (
            "LiverollError",
            "LogitsError",
            "ConfigError",
            "PromptError",
            "PrefillLimitError",
            "UnsupportedModelError",
            "UnsupportedGenerationError",
            "KVMemoryError",
            "CaptureError",
            "CompileError",
            "FusionError",
            "RankError",
            "GatherError",
            "EngineStateError",
        ),
    ),
}
INTRODUCTION = """# API

Every public name, imported from `liveroll`. Fields of configurations, costs and geometry are given by name. This
page is written by `docs/build_api.py` from the docstrings.
"""


def build_page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for section, (module, names) in SECTIONS.items():
        source = (PACKAGE / f"{module}.py").read_text("utf-8")
        nodes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        found = {node.name: node for node in nodes}
        parts.append(f"## {section}\n")
        parts.extend(_entry(found[name], source) for name in names)
    return "\n".join(parts)


def _entry(node: ast.ClassDef | ast.FunctionDef, source: str) -> str:
    if isinstance(node, ast.ClassDef):
        return _class(node, source)
    return f"### `{node.name}`\n\n```python\n{node.name}{_signature(node)}\n```\n\n{_prose(node)}"


def _class(node: ast.ClassDef, source: str) -> str:
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    parts = [f"### `{node.name}`\n"]
    if bases:
        parts.append(f"A {' and a '.join(f'`{base}`' for base in bases)}.\n")
    if fields := _fields(node, source):
        parts.append("```python\n" + "\n".join(fields) + "\n```\n")
    parts.append(_prose(node))
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
            parts.append(f"#### `{node.name}.{member.name}{_signature(member)}`\n\n{_prose(member)}")
        elif isinstance(member, ast.FunctionDef) and member.name == "__init__":
            parts.insert(1, f"```python\n{node.name}{_signature(member)}\n```\n")
    return "\n".join(parts)


def _fields(node: ast.ClassDef, source: str) -> list[str]:
    found = [member for member in node.body if isinstance(member, ast.AnnAssign)]
    return [ast.get_source_segment(source, member) or "" for member in found]


def _signature(node: ast.FunctionDef) -> str:
    if any(isinstance(mark, ast.Name) and mark.id in ("property", "cached_property") for mark in node.decorator_list):
        return f": {ast.unparse(node.returns)}" if node.returns else ""
    arguments = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
    returns = ast.unparse(node.returns) if node.returns else "None"
    return f"({arguments})" + ("" if node.name == "__init__" else f" -> {returns}")


def _prose(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Turn a Google-style docstring into Markdown: its sections become lists."""
    lines: list[str] = []
    listed = False
    for line in inspect.cleandoc(ast.get_docstring(node) or "").splitlines():
        if heading := re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line):
            lines += [f"**{heading[1]}**", ""]
            listed = heading[1] in ("Args", "Attributes", "Raises")
        elif listed and (entry := re.fullmatch(r"    (\w+): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            lines.append("  " + line.strip() if listed and line.startswith("     ") else line.strip())
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (DOCS / "api.md").write_text(build_page(), "utf-8")
