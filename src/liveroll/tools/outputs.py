"""Files that a command is to write, looked at before it begins: what takes hours is not to fail at its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from liveroll.errors import ConfigError


def check_output(out: Path, *inputs: Path) -> None:
    """Refuse a path that no file can be written to, or that would replace what is read.

    Args:
        out: the file; it need not exist.
        inputs: files that the command reads; they need not exist either.

    Raises:
        ConfigError: there is no such folder, it or the file may not be written to, the path is no file's, or it is
            one of the inputs.
    """
    if not out.name or (out.exists() and not out.is_file()):
        raise ConfigError(f"cannot write to {out}: it is not a file; give the name of one")
    if not out.parent.is_dir():
        raise ConfigError(f"cannot write to {out}: there is no folder {out.parent}")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ConfigError(f"cannot write to {out}: it, or the folder, may not be written to")
    for path in inputs:
        if out.exists() and path.exists() and out.samefile(path):
            raise ConfigError(f"cannot write to {out}: it would replace {path}, which is read; give another --out")


@contextmanager
def writing(out: Path | str) -> Iterator[None]:
    """Name what is written where that fails after all, as on a disk that is full.

    Args:
        out: the file, or what to call it.

    Raises:
        ConfigError: in the place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}") from error


def make_folder(out: Path) -> None:
    """Make a folder for what a command writes, unless there is one.

    Raises:
        ConfigError: it cannot be made, or nothing may be written to it.
    """
    with writing(f"the folder {out}"):
        out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise ConfigError(f"cannot write to the folder {out}: it may not be written to")
