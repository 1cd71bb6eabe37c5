"""Files of JSON that a user names."""

from __future__ import annotations

import json
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
