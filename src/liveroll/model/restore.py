"""Putting things back even when the user presses Ctrl-C at that moment."""

from __future__ import annotations

from collections.abc import Callable


def restore_in_full(restore: Callable[[], None]) -> None:
    """Restore, and if an interrupt arrives meanwhile restore again before it goes on.

    Args:
        restore: may be called twice, the first time in part.
    """
    try:
        restore()
    except KeyboardInterrupt:
        restore()
        raise
