"""What users rely on without running a model: names, lazy imports, typing, and what the README shows."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

import liveroll

ROOT = Path(__file__).parents[2]
PACKAGE = Path(liveroll.__file__).parent
DECIDING = sorted(path for room in ("scheduling", "planning") for path in (PACKAGE / room).rglob("*.py"))

PUBLIC = {
    "Bucket",
    "CaptureError",
    "CompileError",
    "Completion",
    "ConfigError",
    "CostModel",
    "EngineStateError",
    "FusionError",
    "GatherError",
    "KVMemoryError",
    "LiverollError",
    "LogitsError",
    "ModelGeometry",
    "PrefillLimitError",
    "PromptError",
    "RankError",
    "ResolvedSampling",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutFusion",
    "RolloutMemory",
    "RolloutProfile",
    "RolloutRequest",
    "RolloutStats",
    "RouteCandidate",
    "RoutePlan",
    "SamplingConfig",
    "UnsupportedGenerationError",
    "UnsupportedModelError",
    "plan_buckets",
}


def loaded_after(statement: str) -> set[str]:
    """Name the modules that a fresh interpreter holds after a statement."""
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_public_names_are_these() -> None:
    """Guards against a name added or lost by accident, and against one listed that cannot be imported."""
    assert set(liveroll.__all__) == PUBLIC
    assert list(liveroll.__all__) == sorted(liveroll.__all__)
    assert dir(liveroll) == sorted(PUBLIC)
    for name in liveroll.__all__:
        assert getattr(liveroll, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Engine'"):
        _ = liveroll.Engine


def test_the_api_page_says_what_the_docstrings_say() -> None:
    """Guards against documentation of names, arguments and defaults that are no longer so."""
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    builder = runpy.run_path(str(ROOT / "docs" / "build_api.py"))
    assert page == builder["build_page"](), "run: python docs/build_api.py"
    assert [name for name in PUBLIC if f"### `{name}`" not in page] == []


def test_the_architecture_page_knows_every_module() -> None:
    """Guards against modules that were added, renamed or split, and a page that shows what was before."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    modules = [path for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__")]
    assert [path for path in modules if f"`{path.stem}`" not in page and f"`{path.name}`" not in page] == []


@pytest.mark.parametrize("statement", ["import liveroll", "import liveroll.cli", "import liveroll.tools.jobs"])
def test_importing_loads_neither_torch_nor_transformers(statement: str) -> None:
    """Guards against `liveroll --help`, or reading a config, taking seconds and gigabytes."""
    assert not loaded_after(statement) & {"torch", "transformers"}


def test_what_decides_imports_no_torch() -> None:
    """Guards against scheduling or planning reaching for tensors, directly or through another module."""
    assert len(DECIDING) > 2
    for path in DECIDING:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"torch", "transformers"}, path
    modules = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in DECIDING]
    assert "torch" not in loaded_after("\n".join(f"import {module}" for module in modules))


def test_the_package_says_that_it_is_typed() -> None:
    """Guards against type checkers of users ignoring our annotations."""
    assert resources.files("liveroll").joinpath("py.typed").is_file()


def test_the_changelog_has_this_version() -> None:
    """Guards against a release without notes."""
    assert f"## [{liveroll.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def python_blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    return [block.split("```")[0] for block in text.split("```python\n")[1:]]


PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("getting-started", "partial-rollouts", "ranks", "routes", "sampling")),
]


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against an example that a newcomer copies and that fails."""
    blocks = python_blocks(page)
    assert blocks
    names: dict[str, object] = {"__name__": "example"}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert capsys.readouterr().out
