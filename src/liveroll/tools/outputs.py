"""Files that a command is to write, looked at before it begins: what takes hours is not to fail at its end."""

from __future__ import annotations

import os
from pathlib import Path

from liveroll.errors import ConfigError


def check_output(out: Path) -> None:
    """Refuse a path that no file can be written to.

    Args:
        out: the file; it need not exist.

    Raises:
        ConfigError: there is no such folder, it or the file may not be written to, or the path is no file's.
    """
    if not out.name or out.is_dir():
        raise ConfigError(f"cannot write to {out}: it is not a file; give the name of one")
    if not out.parent.is_dir():
        raise ConfigError(f"cannot write to {out}: there is no folder {out.parent}")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ConfigError(f"cannot write to {out}: it, or the folder, may not be written to")
