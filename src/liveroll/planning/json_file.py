"""Files of JSON that a user names."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from liveroll.errors import ConfigError


def read_json(path: Path, what: str) -> Any:
    """What a file holds.

    Args:
        path: the file.
        what: it should be, in words.

    Raises:
        ConfigError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the {what} {path} is not JSON: {error}") from error


def write_json(path: Path, content: Any) -> None:
    """Write a file, and the folders that it is in.

    Whoever reads the path meanwhile, or after a kill, finds the file that was there before, or this one, whole.

    Raises:
        OSError: it cannot be written.
        ValueError: a number is not finite.
    """
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.new")
    try:
        beside.write_text(text, "utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
