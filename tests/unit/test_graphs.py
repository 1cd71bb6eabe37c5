"""The store of captured steps."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liveroll.decode import capture
from liveroll.decode.capture import CudaGraphs, RecordedSteps
from liveroll.decode.graphs import GraphStore
from liveroll.decode.workspace import Workspace as RealWorkspace


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


def test_what_a_broken_capture_leaves(monkeypatch):
    """Guards against a trainer that is left on the stream of captures, and a torch that takes its capture to go on.

    It would never give back memory that it caches, and end the process with an error as it exits. And against a
    capture that begins when the memory its products work in was let go since they were warmed up.
    """
    side, current, ended, pools = Stream(), ["default"], [], iter([(0, 1), (0, 2)])

    @contextmanager
    def on(stream):
        before = current[-1]
        current.append(stream)
        try:
            yield
        finally:
            current.append(before)

    class Capture:
        def __init__(self, graph, *, pool, stream, capture_error_mode):
            self.pool, self.stream = pool, stream

        def __enter__(self):
            current.append(self.stream)

        def __exit__(self, kind, error, trace):
            if kind is not None:
                raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(capture, "_side_stream", lambda device: (side, Workspace(side)))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *what: ended.append(what), raising=False)
    with pytest.raises(RuntimeError, match="during capture"):
        CudaGraphs(torch.device("cpu")).record(lambda: 1 / 0)
    assert current[-1] == "default"
    assert ended == [(None, (0, 1))]
    assert side.done == ["a workspace"]


class Pool(TorchDispatchMode):
    """Takes down what is computed while memory is taken from it."""

    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.done.append(function)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: pool)
    return RealWorkspace(torch.device("cpu"), Stream())


def test_each_library_takes_its_memory_from_the_pool(pool):
    """Guards against cuBLAS that works in other memory than cuBLASLt, of which nobody keeps it."""
    pool.hold()
    assert torch.ops.aten.mm.default in pool._pool.done
    assert torch.ops.aten.addmm.default in pool._pool.done


def test_the_pool_outlives_all_that_refer_to_it(pool):
    """Guards against a process that aborts as it exits, since torch cannot free the pool after a kernel's error."""
    kept = weakref.ref(pool._pool)
    pool._pool = None
    gc.collect()
    assert kept() is not None


def test_memory_that_torch_caches_is_given_back_for_the_pool(pool, monkeypatch):
    """Guards against steps that are not captured on a GPU whose free memory torch holds unused.

    For a pool, and for as long as one is in force, it gives none back.
    """
    given_back = []

    def addmm(*arguments):
        if not given_back:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(torch._C._len_torch_dispatch_stack()))
    pool.hold()
    assert given_back == [0]
