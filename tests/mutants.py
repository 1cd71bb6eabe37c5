"""Breaks one line at a time in a copy of the package, and says which test notices.

    python tests/mutants.py              # every mutant of mutants.toml
    python tests/mutants.py A8 seen      # those whose row, file or description contains each of the words

Prints a row of a table for each. A mutant that no test notices, or whose line is not there any more, makes the exit
code 1.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

# Sets up every test run, and must come before what leads to triton.
import conftest  # noqa: F401
import pytest

# Imported once: each mutant is tested in a fork of this process, which must not have seen liveroll.
import torch  # noqa: F401
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM  # noqa: F401

ROOT = Path(__file__).parents[1]
TIMEOUT = 60
"""Seconds for one test; only a mutant that hangs takes them."""


@dataclass(frozen=True)
class Mutant:
    """One change to the package, and the tests that should notice it.

    Attributes:
        row: the property that the line serves.
        file: path below `src/liveroll`.
        what: the change in words.
        old: text that stands in the file once.
        new: what stands there instead.
        tests: paths below `tests`, run in this order until one fails.
    """

    row: str
    file: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_mutants(words: list[str]) -> Iterator[Mutant]:
    """The mutants of mutants.toml that contain each of the words; an entry with `each` is one for every name in it."""
    for row, entries in tomllib.loads((ROOT / "tests/mutants.toml").read_text("utf-8")).items():
        for entry in entries:
            tests = tuple(entry["tests"])
            for name in entry.get("each", [""]):
                what, old, new = (entry.get(key, "").replace("EACH", name) for key in ("what", "old", "new"))
                if all(word in f"{row} {entry['file']} {what}" for word in words):
                    yield Mutant(row, entry["file"], what, old, new, tests)


def first_failure(copy: Path, tests: tuple[str, ...]) -> str | None:
    """The test that fails first over a copy of the project, run in a fork of this process."""
    context = multiprocessing.get_context("fork")
    result, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_tests, args=(copy, tests, sender))
    process.start()
    sender.close()
    try:
        return result.recv()
    except EOFError:
        return f"none, and the tests ended with {process.exitcode}"
    finally:
        process.join()


def _run_tests(copy: Path, tests: tuple[str, ...], sender: Connection) -> None:
    failed: list[str] = []

    class Listener:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.nodeid.rpartition("::")[2].partition("[")[0])

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                failed.append(f"{report.nodeid} cannot be imported")

    os.chdir(copy)
    sys.path.insert(0, str(copy / "src"))
    # Compiled files are told apart by size and second, in which two mutants may agree.
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    paths = [str(copy / "tests" / test) for test in tests]
    # What was imported before the fork cannot have its asserts rewritten, and none of it has tests.
    options = ["-x", "--thorough", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        code = pytest.main([*options, f"--timeout={TIMEOUT}", *paths], plugins=[Listener()])
    sender.send(failed[0] if failed else f"none, and pytest ended with {code}" if code else None)


def main(words: list[str]) -> int:
    mutants = list(read_mutants(words))
    if not mutants:
        print(f"no mutant has {' and '.join(words)} in its row, file or description")
        return 1
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if failure := first_failure(copy, tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))):
            print(f"{failure} fails without any change")
            return 1
        for mutant in mutants:
            path = copy / "src/liveroll" / mutant.file
            whole = path.read_text("utf-8")
            if whole.count(mutant.old) == 1:
                path.write_text(whole.replace(mutant.old, mutant.new), "utf-8")
                failure = first_failure(copy, mutant.tests)
                path.write_text(whole, "utf-8")
            else:
                failure = None
                print(f"{mutant.file} has `{mutant.old}` {whole.count(mutant.old)} times")
            missed += failure is None
            noticed = "**none**" if failure is None else f"`{failure}`"
            print(f"| {mutant.row} | `{mutant.file}`: {mutant.what} | {noticed} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
