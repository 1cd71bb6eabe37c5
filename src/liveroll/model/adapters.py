"""What PEFT's layers decide in Python in each forward, and so only once for a captured step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


def adapter_state(modules: Sequence[nn.Module]) -> str:
    """Which adapters of the modules are disabled, active, merged and how they are scaled; none without PEFT.

    None of these moves a tensor, and a captured step would go on as it was captured.
    """
    adapted = {kind for kind in set(map(type, modules)) if _is_adapted(kind)}
    if not adapted:
        return "none"
    states = [_state(module) for module in modules if type(module) in adapted]
    distinct = list(dict.fromkeys(states))
    if len(distinct) < 2:
        return "".join(distinct)
    return f"{'; '.join(distinct)} over layers ({hash(tuple(states))})"


def _is_adapted(kind: type[nn.Module]) -> bool:
    # Models of transformers have a method of that name; on PEFT's layers it is a property.
    return isinstance(getattr(kind, "disable_adapters", None), property)


def _state(module: Any) -> str:
    if module.disable_adapters:
        return "disabled"
    words = [", ".join(module.active_adapters), "active"]
    if merged := getattr(module, "merged_adapters", ()):
        words += ["merged", ", ".join(merged)]
    if isinstance(scaling := getattr(module, "scaling", None), dict):
        words += ["scaled", ", ".join(f"{name} by {scale}" for name, scale in scaling.items())]
    return " ".join(words)
