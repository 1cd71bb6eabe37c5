"""The store of captured steps."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from liveroll.decode import capture
from liveroll.decode.capture import CudaGraphs, RecordedSteps
from liveroll.decode.graphs import GraphStore


def test_dropped_steps_leave_their_pool():
    """Guards against a pool of device memory that stays with the store when its steps are gone."""
    pools = []

    class Pool(RecordedSteps):
        def bytes(self):
            return 7

    def make_pool():
        pools.append(Pool())
        return pools[-1]

    store = GraphStore(make_pool, None)
    assert store.bytes == 0
    for rows in (1, 2):
        store.record(("decode", rows), lambda: None)
    assert (store.bytes, len(pools)) == (7, 1)
    store.drop(None)
    assert store.bytes == 0
    store.record(("decode", 1), lambda: None)
    assert (store.bytes, len(pools)) == (7, 2)


class Stream:
    """Takes down what is done on it, and what it waits for."""

    def __init__(self):
        self.done = []

    def wait_stream(self, other):
        self.done.append(other)


class Workspace:
    """Takes down on its stream when it is held."""

    def __init__(self, stream):
        self.hold = lambda: stream.done.append("a workspace")


def test_what_follows_a_failed_warm_up_waits_for_it(monkeypatch):
    """Guards against kernels of a step that failed half-way, which run beside those of the step in its place.

    And against a step whose products work in memory that is let go, as that which torch takes for them would be.
    """
    current, side = Stream(), Stream()

    @contextmanager
    def on(stream):
        assert stream is side
        yield

    def step():
        side.done.append("a kernel")
        raise MemoryError

    monkeypatch.setattr(capture, "_side_stream", lambda device: (side, Workspace(side)))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    with pytest.raises(MemoryError):
        CudaGraphs(torch.device("cpu")).warm_up(step)
    assert side.done == [current, "a workspace", "a kernel"]
    assert current.done == [side]
