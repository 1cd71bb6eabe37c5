"""Attempts to capture, after which all ranks that compute a model together have a step captured, or none has."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from liveroll.decode.capture import Step
from liveroll.decode.failure import describe_failure
from liveroll.decode.graphs import GraphKey, GraphStore
from liveroll.distributed.agreement import any_rank
from liveroll.errors import CaptureError, CompileError


@dataclass(frozen=True)
class FailedCapture:
    """Why a step cannot be captured.

    Attributes:
        cause: the part of the model, or the other ranks, in words.
        error: what was raised on this rank; None where it succeeded.
    """

    cause: str
    error: Exception | None


def attempt_capture(
    graphs: GraphStore, key: GraphKey, step: Step, model: PreTrainedModel, group: ProcessGroup | None
) -> FailedCapture | None:
    """Capture a step, on all ranks of a group or on none; None where it succeeded on all of them.

    While a step is recorded none of its collectives runs, so ranks on which that fails are level with the others, and
    one all-reduce tells all of them. While it is warmed up they do run: a rank on which that fails has left the others
    in a collective, and what it communicates next would be taken for its part of it.

    Args:
        graphs: keeps the step.
        key: what it is found by.
        step: the same on all ranks of the group, which try it at the same time.
        model: what it runs.
        group: the ranks that compute the model together, or None.

    Raises:
        CompileError: it cannot be compiled, and must be.
        CaptureError: it fails on this rank of a group before it is recorded.
    """
    handled = sys.exception()
    try:
        graphs.warm_up(step)
    except CompileError:
        raise
    except Exception as error:
        cause = describe_failure(error, model, handled)
        if group is None:
            return FailedCapture(cause, error)
        raise CaptureError(
            f"a step failed on this rank before it was captured, because of {cause}; other ranks of the "
            "tensor-parallel group may be waiting in its collectives, so it cannot be run eagerly in its place. If "
            "only captured steps fail, set capture=False"
        ) from error
    failed = None
    try:
        graphs.record(key, step)
    except Exception as error:
        failed = FailedCapture(describe_failure(error, model, handled), error)
    if any_rank(failed is not None, group, model.device):
        graphs.discard(key)
        return failed or FailedCapture("another rank of the tensor-parallel group, where it failed", None)
    return None
