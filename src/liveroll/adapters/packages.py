"""Packages of trainers, which are imported when they are needed and never before."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load_package(name: str, reason: str) -> Any:
    """Import a package that an extra of liveroll installs.

    Args:
        name: of the package and of the extra.
        reason: what it is needed for, for the error.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f'{reason}, and {name} is not installed: pip install "liveroll[{name}]"', name=name) from None
