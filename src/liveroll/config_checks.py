"""What every configuration checks of its fields when it is made."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable
from dataclasses import fields
from numbers import Real
from typing import Any, TypeVar

from liveroll.errors import ConfigError

Config = TypeVar("Config")

MOST_ROWS = 1 << 20
"""Rows that one number may ask for: more fill the host's memory before anything can refuse them."""

MOST_TOKENS = 1 << 24
"""Tokens of a row that one number may ask for, likewise."""


def naming_unknown_options(cls: type[Config]) -> type[Config]:
    """Let a dataclass answer an option that it does not have with the ones that it has."""
    create: Callable[..., None] = cls.__init__

    @functools.wraps(create)
    def init(self: Config, *args: Any, **options: Any) -> None:
        known = [field.name for field in fields(self)]  # type: ignore[arg-type]
        for name in options:
            if name not in known:
                meant = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {meant[0]}?" if meant else f"its options are {', '.join(known)}"
                raise ConfigError(f"{cls.__name__} has no option {name}; {hint}")
        create(self, *args, **options)

    cls.__init__ = init  # type: ignore[assignment, method-assign]
    return cls


def check_whole(config: Any, name: str, *, low: float, high: int | None = None, optional: bool = False) -> None:
    """Raise ConfigError unless a field is a whole number in a range, or None where that is allowed."""
    value = _settle(config, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{_owner(config, name)} must be a whole number, not {value!r}")
    if value < low:
        raise ConfigError(f"{_owner(config, name)} must be at least {low}, not {value}")
    if high is not None and value > high:
        raise ConfigError(f"{_owner(config, name)} must be at most {high}, not {value}")


def check_number(
    config: Any,
    name: str,
    *,
    low: float,
    high: float = math.inf,
    low_open: bool = False,
    optional: bool = False,
) -> None:
    """Make a field a float; ConfigError unless it is a number in a range, or None where that is allowed."""
    value = _settle(config, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{_owner(config, name)} must be a number, not {value!r}")
    inside = _is_finite(value) and (value > low if low_open else value >= low) and value <= high
    if not inside:
        bounds = f"{'above' if low_open else 'at least'} {low:g}"
        bounds += f" and at most {high:g}" if math.isfinite(high) else " and finite"
        raise ConfigError(f"{_owner(config, name)} must be {bounds}, not {value}")
    object.__setattr__(config, name, float(value))


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def check_flag(config: Any, name: str, *, optional: bool = False, besides: str = "") -> None:
    """Raise ConfigError unless a field is True or False; `besides` says what else it may be."""
    value = getattr(config, name)
    if value is None and optional:
        return
    if not isinstance(value, bool):
        allowed = f"True, False or {besides}" if besides else "True or False"
        raise ConfigError(f"{_owner(config, name)} must be {allowed}, not {value!r}")


def check_choice(config: Any, name: str, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless a field is one of the allowed words."""
    value = getattr(config, name)
    if value not in allowed:
        raise ConfigError(f"{_owner(config, name)} must be one of {', '.join(allowed)}, not {value!r}")


def check_tuple(config: Any, name: str, kind: type) -> tuple[Any, ...]:
    """The entries of a field, every one of that type and no number negative; ConfigError otherwise."""
    value = getattr(config, name)
    if isinstance(value, kind) or not hasattr(value, "__iter__"):
        raise ConfigError(f"{_owner(config, name)} must be a sequence of {kind.__name__}, not {value!r}")
    items = tuple(_plain(item) for item in value)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, kind):
            raise ConfigError(f"{_owner(config, name)} holds {item!r}; every entry must be of type {kind.__name__}")
        if isinstance(item, int) and item < 0:
            raise ConfigError(f"{_owner(config, name)} holds {item}; token ids begin at 0")
    return items


def check_biases(config: Any, name: str, *, high: float) -> tuple[tuple[int, float], ...]:
    """The pairs of token id and number, at most `high` either way, that a field maps, by ascending id.

    JSON writes the ids as strings, so these are taken too.
    """
    given, owner = getattr(config, name), _owner(config, name)
    try:
        entries = dict(given).items()
    except (TypeError, ValueError):
        raise ConfigError(f"{owner} must map token ids to numbers, not be {given!r}") from None
    pairs: dict[int, float] = {}
    for token, value in entries:
        token = int(token) if isinstance(token, str) and token.isdecimal() else _plain(token)
        value = _plain(value)
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ConfigError(f"{owner} holds {token!r}, which is no token id")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= high:
            raise ConfigError(f"{owner} of token {token} must be a number within {high:g} of 0, not {value!r}")
        pairs[token] = float(value)
    return tuple(sorted(pairs.items()))


def _owner(config: Any, name: str) -> str:
    # What is given to a call is no field of anything that its caller knows.
    return name if getattr(config, "of_call", False) else f"{type(config).__name__}.{name}"


def _plain(value: Any) -> Any:
    """The Python number in a NumPy scalar; anything else as it is."""
    return value.item() if isinstance(value, Real) and hasattr(value, "item") else value


def _settle(config: Any, name: str) -> Any:
    """Keep a field as a plain Python number, and return it."""
    value = _plain(getattr(config, name))
    object.__setattr__(config, name, value)
    return value
