"""Which part of a model a failed capture came from."""

from __future__ import annotations

import traceback

from torch import nn


def describe_failure(error: BaseException, model: nn.Module, handled: BaseException | None = None) -> str:
    """The innermost module of `model` that an error came through, and what it says.

    Args:
        error: what was raised.
        model: what was run.
        handled: what the caller was handling before, which has no part in it.
    """
    # Ending a failed capture fails too, and hides why.
    while error.__context__ is not None and error.__context__ is not handled:
        error = error.__context__
    names = {id(module): name for name, module in model.named_modules()}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            found = f"{names[id(owner)] or 'the model'} ({type(owner).__name__})"
    message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"{found or 'the step around the model'}: {message}"
