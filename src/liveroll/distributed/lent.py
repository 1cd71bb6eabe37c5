"""A process group that the trainer made, and may destroy before the engine ends."""

from __future__ import annotations

import weakref

from torch import distributed as dist
from torch.distributed import ProcessGroup

from liveroll.errors import EngineStateError


class LentGroup:
    """Finds a process group for as long as the trainer has it, without holding it.

    A gloo group that something still holds after `destroy_process_group` keeps its threads. One of them may let go of a
    collective's tensors while the interpreter ends, which aborts the process.

    Args:
        group: the group, or None.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self._reference = None if group is None else weakref.ref(group)

    def get(self) -> ProcessGroup | None:
        """The group, or None where there was none from the beginning.

        Raises:
            EngineStateError: it has been destroyed.
        """
        if self._reference is None:
            return None
        group = self._reference()
        if group is None or is_destroyed(group):
            raise EngineStateError(
                "the process group that computes the model's layers has been destroyed; make another engine with the "
                "group that is used now"
            )
        return group


def is_destroyed(group: ProcessGroup) -> bool:
    """Whether `destroy_process_group` has ended a group, which whoever holds it does not see it by."""
    try:
        dist.get_rank(group)
    except ValueError:
        return True
    return False
