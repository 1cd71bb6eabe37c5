"""Ranks that run their forwards together, because each needs the weights that the others hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from liveroll.distributed.agreement import any_rank


@contextmanager
def in_step(
    model: nn.Module, groups: Sequence[ProcessGroup], device: torch.device, idle: Callable[[], None]
) -> Iterator[None]:
    """Inside, a rank runs a forward when every rank does; at the end it idles along until all of them have ended.

    Before each forward the ranks vote whether any of them goes on: one all-reduce a group. It does not matter what the
    forwards are of, so ranks may have prompts of any number and length, or none at all. A rank that fails outside of
    a forward lets the others end.

    Args:
        model: whose forwards are counted.
        groups: ranks that vote together; several where they form a mesh, one for each of its dimensions.
        device: where the groups' backends reduce.
        idle: runs one forward of the model.
    """
    broken = False

    def goes_on(own: bool) -> bool:
        for group in groups:
            own = any_rank(own, group, device)
        return own

    def before(*_: Any) -> None:
        nonlocal broken
        broken = True  # an interrupt that arrives during the vote shows when it is over
        goes_on(True)

    def after(*_: Any) -> None:
        nonlocal broken
        broken = False

    handles = [model.register_forward_pre_hook(before, prepend=True), model.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        # Once a forward was voted for the others wait for weights, and no vote would reach them.
        while not broken and goes_on(False):
            idle()
